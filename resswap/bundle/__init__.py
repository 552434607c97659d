"""The code that a saved model brings along, so that it loads where resswap is not installed.

`configuration_resswap.py` and `modeling_resswap.py` are written for the model: the rewritten `forward`s as subclasses
of the family's classes. What they need of resswap is copied from its own files, see `flatten`.
"""

from transformers import PreTrainedModel

from resswap.auto import model_classes
from resswap.configuration import Code, family_config_class, residual_config_class
from resswap.errors import UnsupportedModelError
from resswap.schemes import SchemeConfig

from .flatten import flatten
from .structure import structure
from .writing import CONFIGURATION, HEADER, MODELING, carried_files, configuration_file, modeling_file


def bundle(model: PreTrainedModel, scheme: SchemeConfig) -> Code:
    """The code for a converted model; equal for models of equal structure, whatever their head and weights.

    Raises:
        UnsupportedModelError: the family or the scheme is not defined where a saved model could take it along.
    """
    found = structure(model)
    family = family_config_class(type(model.config))
    heads = {auto.__name__: head for auto, head in model_classes(family).items() if not auto.__name__.startswith("_")}
    used = [*(rewritten.original for rewritten in found.classes), *heads.values(), family]
    outside = [cls for cls in used if not cls.__module__.startswith("transformers.")]
    if outside:
        raise UnsupportedModelError(f"{outside[0].__name__} is not part of transformers.")
    if not heads:
        raise UnsupportedModelError(f"No Auto class of transformers knows {family.__name__}.")

    decorators = {rewritten.decorator for rewritten in found.classes} - {None}
    needed = {
        (type(scheme).__module__, type(scheme).__name__),
        ("resswap.configuration", "ResidualConfigMixin"),
        *(
            ("resswap.installation", name)
            for name in ("Conversion", "ConvertedModel", "Part", "Slot", "check_origins")
        ),
        *((decorator.__module__, decorator.__name__) for decorator in decorators),
    }
    files = dict(flatten(frozenset(needed), HEADER))
    carried = carried_files(files)
    files[f"{CONFIGURATION}.py"] = configuration_file(family, scheme, found.classes, carried)
    files[f"{MODELING}.py"] = modeling_file(family, scheme, found, heads, carried)
    config_class = residual_config_class(family).__name__
    auto_map = {auto: f"{MODELING}.{head.__name__}" for auto, head in heads.items()}
    return Code(files, {"AutoConfig": f"{CONFIGURATION}.{config_class}", **auto_map})
