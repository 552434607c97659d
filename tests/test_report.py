"""The table, the data, the figure and the page of a report."""

import json
import shutil
import subprocess

import pytest
import torch
from tiny import SCHEMES, input_ids, randomise_connections, tiny

import resswap
from resswap.surgery import READOUT


def batch():
    return {"input_ids": input_ids(), "labels": input_ids()}


def model_of(scheme):
    model = tiny()
    if scheme != "residual":
        randomise_connections(resswap.convert(model, scheme))
    return model


@pytest.mark.parametrize("scheme", ["residual", *SCHEMES])
def test_table_and_data(scheme):
    report = resswap.inspect(model_of(scheme), batch())
    lines = str(report).splitlines()
    assert scheme in lines[0] and f"loss {report.loss:.4f}" in lines[0]
    assert all(any(word in line for line in lines) for word in ("0.attn", "2.mlp", READOUT, "gradient"))
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["measures"][1]["input_rms"] == report.measures[1].input_rms
    assert data["summary"] == report.summary()


def test_numbers_that_json_does_not_have():
    model = model_of("mhc")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("inf"))
    report = resswap.inspect(model, batch())
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert '"NaN"' in text or '"Infinity"' in text
    assert "nan" in str(report) or "inf" in str(report)
    report.figure()


@pytest.mark.parametrize("scheme", ["residual", *SCHEMES])
def test_the_figure_shows_what_was_measured(scheme):
    report, plain = resswap.inspect(model_of(scheme), batch()), resswap.inspect(tiny(), batch())
    panels = {axis.get_title(): axis for axis in report.figure(plain).axes if axis.get_title()}
    lines = panels["gradient norm at the branch output"].get_lines()
    for line, source in zip(lines, (report, plain), strict=True):
        assert list(line.get_ydata()) == [m.gradient_norm for m in source.measures[:-1]]
    for kind, title in (("read", f"who reads what ({scheme})"), ("write", f"who writes where ({scheme})")):
        rows = [getattr(m, kind) or () for m in report.measures]
        assert (title in panels) == (max(map(len, rows)) > 1)
        if title in panels:
            grid = panels[title].get_images()[0].get_array()
            shown = [tuple(value for value in row.tolist() if value is not None) for row in grid]
            assert shown == [tuple(row) for row in rows]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
]


def test_the_page_needs_nothing_else(tmp_path):
    model = model_of("mhc")
    path = tmp_path / "new folder" / "report.html"
    report = resswap.inspect(model, batch())
    report.save_html(path, resswap.inspect(tiny(), batch()))
    text = path.read_text()
    assert text.count("<svg") == 1 and "src=" not in text and "<link" not in text and "@import" not in text
    data = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)[0] == report.to_dict()
    with pytest.raises(TypeError, match="LlamaForCausalLM is not a report"):
        report.save_html(path, model)


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_shows_the_page(tmp_path):
    path, picture = tmp_path / "report.html", tmp_path / "page.png"
    report = resswap.inspect(model_of("mhc"), batch())
    report.save_html(path, resswap.inspect(tiny(), batch()))

    def browse(*flags):
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, path.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    shown = browse("--dump-dom")
    assert "CONSOLE" not in shown.stderr, shown.stderr  # where what was refused or failed is told
    assert shown.stdout.count("<tr>") == 2 * 8 + 1 + len(report.summary())
    for word in ("who reads what (mhc)", "composite forward", "2.mlp", f"{report.measures[1].input_rms:.3g}"):
        assert word in shown.stdout
    browse(f"--screenshot={picture}", "--window-size=1250,1800")
    pixels = torch.tensor(bytearray(picture.read_bytes()))
    assert len(pixels) > 50_000  # an empty page takes a few thousand bytes
