"""Small layers that show one shape of residual add each."""

import functools

import torch
from torch import nn


class Base(nn.Module):
    flag = False
    scale = 0.5

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.self_attn = nn.Linear(8, 8)
        self.mlp = nn.Linear(8, 8)


class Plain(Base):
    def forward(self, hidden_states, other=None):
        residual = hidden_states  # the read
        hidden_states = self.norm(hidden_states)
        hidden_states = self.self_attn(hidden_states)
        hidden_states = residual + hidden_states  # the add

        # Fully connected: ü
        residual = hidden_states
        hidden_states = self.mlp(self.norm(hidden_states))
        hidden_states = hidden_states + residual
        return hidden_states


class ScaledBranches(Base):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.self_attn(self.norm(hidden_states))
        hidden_states = residual + hidden_states * self.scale
        residual = hidden_states
        hidden_states = self.mlp(self.norm(hidden_states))
        hidden_states = (
            residual
            # half of it
            + (hidden_states * self.scale)
        )
        return hidden_states, None


class NoAlias(Base):
    def forward(self, x):
        x = x + self.self_attn(self.norm(x))
        attended = self.mlp(self.norm(x))
        return attended + x


class AliasUsedElsewhere(Base):
    def forward(self, hidden_states):
        batch = hidden_states.shape[0]
        residual = hidden_states
        hidden_states = self.self_attn(self.norm(hidden_states)) + 0 * self.mlp(residual)
        hidden_states = residual + hidden_states.view(batch, -1, 8)
        return (hidden_states, batch)


class Augmented(Base):
    def forward(self, hidden_states):
        residual = hidden_states
        y = self.self_attn(self.norm(hidden_states))
        y += residual
        hidden_states = y
        y = self.mlp(self.norm(hidden_states))
        hidden_states += y
        return hidden_states


class ThreeTerms(Base):
    def forward(self, hidden_states):
        attn_output = self.self_attn(self.norm(hidden_states))
        mlp_output = self.mlp(self.norm(hidden_states))
        return (attn_output + hidden_states) + mlp_output


class Flags(Base):
    def forward(self, hidden_states):
        if self.flag:
            residual = hidden_states
            hidden_states = residual + self.missing(hidden_states)
        elif not self.flag and self.scale > 0.1:
            residual = hidden_states
            hidden_states = residual + self.self_attn(hidden_states)
        residual = hidden_states
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + (hidden_states if self.flag else 2 * hidden_states)
        outputs = (hidden_states,)
        if self.flag:
            outputs += (residual,)
        return outputs


class CallArguments(Base):
    def forward(self, hidden_states, other=None):
        residual = hidden_states
        hidden_states = residual + self.self_attn(hidden_states)
        if other is not None:
            if not hasattr(self, "mlp"):
                raise ValueError("no mlp")
            residual = hidden_states
            hidden_states = self.norm(hidden_states)
            hidden_states = residual + self.mlp(hidden_states) * other
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        if other is None:
            hidden_states = self.mlp(hidden_states)
        else:
            hidden_states = self.self_attn(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class AddInBothWays(Base):
    def forward(self, hidden_states, other=None):
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        if other is None:
            hidden_states = residual + self.mlp(hidden_states)
        else:
            hidden_states = residual + self.self_attn(hidden_states)
        return hidden_states


class MaybeNothing(Base):
    def forward(self, hidden_states, other=None):
        residual = hidden_states
        if other is not None:
            hidden_states = residual + self.mlp(self.norm(hidden_states))
        return hidden_states


class Parent(Base):
    def forward(self, hidden_states):
        return self.norm(hidden_states)


class CallsSuper(Parent):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = super().forward(hidden_states)
        hidden_states = residual + self.__twice(hidden_states)
        return hidden_states

    def __twice(self, value):
        return 2 * value


def tripled(function):
    @functools.wraps(function)
    def wrapper(self, hidden_states):
        return 3 * function(self, hidden_states)

    return wrapper


class Decorated(Base):
    @tripled
    def forward(self, hidden_states):
        with torch.no_grad():
            residual = hidden_states
            hidden_states = residual + self.mlp(hidden_states)
        return hidden_states


class Inherits(Plain):
    pass


class PostNorm(Base):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.norm(residual + self.self_attn(hidden_states))
        residual = hidden_states
        hidden_states = residual + self.mlp(hidden_states)
        hidden_states = self.norm(hidden_states)
        return hidden_states


class ScaledStream(Base):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.self_attn(self.norm(hidden_states))
        hidden_states = self.scale * residual + hidden_states
        residual = hidden_states
        hidden_states = self.mlp(self.norm(hidden_states))
        residual = residual.to(torch.float32)
        hidden_states = residual + hidden_states
        hidden_states *= self.scale + 1
        return hidden_states


class Reshaped(Base):
    def forward(self, hidden_states):
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, hidden_states.size(-1))
        residual = hidden_states
        hidden_states = self.mlp(self.norm(hidden_states))
        hidden_states = (residual + hidden_states).view(shape)
        return hidden_states


class Listed(Base):
    """Submodules in a list, a condition with a name, and a guard against overflow that looks at the dtype first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList([AttentionModule(), OutputModule()])

    def forward(self, hidden_states, other=None):
        hidden_states, weights = self.layer[0](hidden_states)
        if hidden_states.dtype == torch.float32:
            largest = hidden_states.abs().max()
            hidden_states = torch.clamp(hidden_states, min=-0.9 * largest, max=0.9 * largest)
        use_other = self.flag and other is not None
        if use_other:
            hidden_states = other
        hidden_states = self.layer[-1](self.mlp(hidden_states), hidden_states)
        return hidden_states, weights


class UsedAfterASum(Base):
    def forward(self, hidden_states, other=None):
        residual = hidden_states
        hidden_states = hidden_states + other if other is not None else hidden_states
        hidden_states = self.mlp(self.norm(hidden_states))
        hidden_states = residual + hidden_states
        return hidden_states


def scaled_add(x, residual, scale):
    x = scale * x
    if residual is not None:
        x = residual * 0.5 + x
    return x


class Helper(Base):
    def forward(self, hidden_states):
        hidden_states = scaled_add(self.self_attn(self.norm(hidden_states)), hidden_states, self.scale)
        hidden_states = scaled_add(self.mlp(hidden_states), residual=hidden_states, scale=2.0)
        return hidden_states


class OutputModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, hidden_states, input_tensor):
        return self.norm(self.dense(hidden_states) + input_tensor)


class AttentionModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.output = OutputModule()

    def forward(self, hidden_states):
        attended = self.inner(hidden_states)
        attended = self.output(attended, hidden_states)
        return attended, None


class BertLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = AttentionModule()
        self.intermediate = nn.Linear(8, 8)
        self.output = OutputModule()

    def forward(self, hidden_states):
        outputs = self.attention(hidden_states)
        attended = outputs[0]
        hidden_states = self.chunk(attended)
        return (hidden_states,) + outputs[1:]

    def chunk(self, attention_output):
        return self.output(self.intermediate(attention_output), attention_output)
