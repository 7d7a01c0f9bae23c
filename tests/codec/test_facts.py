# Every codec of the name table states its facts: speed, error, what it loses. The planner and the benchmarks take them
# from there, and the tables of the documentation must agree. A gap fails here.

import re

import pytest
import torch

import gossamer as gs
from gossamer.bench import options
from gossamer.codec import CODECS, Codec, NativeCodec
from gossamer.planner import Network, Speeds, predict, transformer
from tests import ROOT

LISTED = re.findall(r"^ *CODEC\((\d+), (\w+), \w+\)", (ROOT / "csrc/codec/codec_list.h").read_text(), re.M)


def rows_of(page: str) -> list[list[str]]:
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_states_its_facts_and_its_error_is_that_of_a_round_trip(name) -> None:
    kind = CODECS[name]
    assert kind.name == name
    assert kind.facts is not None
    assert min(vars(kind.facts.speed).values()) > 0
    assert kind.facts.loses
    x = torch.randn(1, 1 << 18, generator=torch.Generator().manual_seed(0))
    codec = kind()
    error = float((codec.decode(codec.encode(x), torch.empty_like(x)) - x).norm() / x.norm())
    assert error == pytest.approx(kind.facts.error, rel=0.05)


def test_every_line_of_the_native_list_has_one_face_of_its_name() -> None:
    faces = {(kind.kind, name) for name, kind in CODECS.items() if issubclass(kind, NativeCodec)}
    assert faces == {(int(number), name) for number, name in LISTED}


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_is_planned_and_benched_and_public(name) -> None:
    kind = CODECS[name]
    assert Speeds().of(gs.ErrorFeedback(kind())) == kind.facts.speed
    assert name == "identity" or name in options.CODECS
    assert kind.facts.needs_feedback == (f"{name}-ef" in options.FEEDBACK)
    assert kind.facts.stochastic == (f"{name}-stochastic" in options.CODECS)
    assert getattr(gs.codec, kind.__name__) is kind


@pytest.mark.parametrize("name", CODECS)
def test_the_table_on_the_page_of_codecs_agrees_with_the_codec(name) -> None:
    kind = CODECS[name]
    found = [row for row in rows_of("docs/codecs.md") if f".{kind.__name__}(" in row[0]]
    assert len(found) == 1, f"docs/codecs.md: one row for {kind.__name__}"
    settings, size, loses = found[0]
    codec, numel = kind(), 1 << 20
    if name != "identity":
        formula = size.replace("\N{MULTIPLICATION SIGN}", "*").replace("block", str(codec.block))
        bytes_each = eval(formula, {"density": getattr(codec, "density", None)})
        assert codec.wire_bytes(numel) / numel == pytest.approx(bytes_each, rel=1e-3)
    assert kind.facts.loses.split(",")[0] in loses
    assert ("needs error feedback" in loses) <= kind.facts.needs_feedback
    assert not (codec.block > 1) or re.search(rf"(block|chunk)={codec.block}\b", settings)


@pytest.mark.parametrize("name", CODECS)
def test_the_page_of_codecs_gives_the_row_sizes_of_the_codec(name) -> None:
    codec = CODECS[name]()
    if not isinstance(codec, NativeCodec):
        return  # whose size of a row is in its own section
    heading = next(row for row in rows_of("docs/codecs.md") if row[0].startswith("float32, m ="))
    sizes = [int(cell.replace(",", "").split()[-1]) for cell in ["1", *heading[2:]]]
    label = f"`{type(codec).__name__}({codec.block})`" if codec.block > 1 else f"`{type(codec).__name__}`"
    row = next(row for row in rows_of("docs/codecs.md") if label in row[0] and len(row) == len(heading))
    assert [int(cell.replace(",", "")) for cell in row[1:]] == [codec.wire_bytes(size) for size in sizes]


def test_a_codec_without_a_speed_is_refused_by_the_planner() -> None:
    class Silent(gs.TopK):
        facts = None

    problem, _ = transformer(300_000, 0.01)
    with pytest.raises(
        gs.ConfigError, match=r"plan: the speed of Silent\(density=0.01\) must be known, got none"
    ):
        predict(problem, Network(2), gs.GradientAllReduce(codec=Silent()))
    assert issubclass(Silent, Codec)
