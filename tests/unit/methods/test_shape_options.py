"""Options of a trained drafter's shape: they reach the shape, or are refused by name."""

import math
from typing import Any

import pytest

from outpace.drafters.model_options import ModelOptions
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import parse_method
from outpace.trees.shapes.beam import BeamConfig, DddConfig, SearchConfig
from outpace.trees.shapes.dynatree import BaselineTreeConfig, DynaTreeConfig, FixedTreeConfig
from outpace.trees.shapes.gates import CutConfig, EchoConfig, GatedConfig
from outpace.trees.shapes.svip import SvipConfig

GATED = GatedConfig(checkpoints=(1, 3), kept=(8, 40), thresholds=(0.2, 0.4))


def tree_of(method: str) -> Any:
    options = parse_method(method).options
    assert isinstance(options, ModelOptions)
    return options.shape_settings()


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("eagle3", BeamConfig()),
        ("eagle3:depth=6,breadth=4,budget=20", BeamConfig(depth=6, breadth=4)),
        ("dart", SearchConfig()),
        ("dart:beam=5,depth=4", SearchConfig(beam=5, depth=4)),
        ("dart:shape=beam", BeamConfig()),
        ("domino", None),
        ("domino:pool=9,depth=3,shape=fixed,breadth=2", FixedTreeConfig(depth=3, breadth=2)),
        ("dflash:shape=dynatree,depth=6,history=off", DynaTreeConfig(depth=6, history="off")),
        ("medusa", None),
        ("eagle3:shape=gated,checkpoints=1/3,kept=8/40,thresholds=0.2/0.4", GATED),
        ("domino:shape=ddd,checkpoints=3,min_beam_prob=0.1", DddConfig(checkpoints=(3,), min_beam_prob=0.1)),
        ("medusa:shape=svip,entropy_threshold=inf", SvipConfig(entropy_threshold=math.inf)),
        ("graft", GatedConfig()),
        ("graft:retrieve=none", GatedConfig()),
        ("graft:place=tail", GatedConfig()),
        ("graft:shape=beam,reserved=0.5", BeamConfig()),
        ("graft-dflash:retrieve=none", CutConfig()),
        ("graft-domino", CutConfig()),
        ("graft-dflash:min_prob=0.5,place=root", CutConfig(min_prob=0.5)),
        ("linear", None),
        ("linear:shape=beam,depth=3,breadth=4,budget=20", BeamConfig(depth=3, breadth=4)),
        ("linear:shape=cut,min_prob=0.5,retrieve=matrix,place=tail", CutConfig(min_prob=0.5)),
        ("linear:shape=gated,checkpoints=1/3,kept=8/40,thresholds=0.2/0.4", GATED),
        ("fixed:depth=3,breadth=2", BaselineTreeConfig(depth=3, breadth=2, root_breadth=1)),
        ("dynatree:depth=6,history=off", DynaTreeConfig(depth=6, history="off")),
        ("svip:entropy_threshold=inf", SvipConfig(entropy_threshold=math.inf)),
        ("ddd", DddConfig()),
        ("echo:thresholds=0.3/0.3/0.3,depth=6", EchoConfig(thresholds=(0.3, 0.3, 0.3), depth=6)),
    ],
)
def test_a_shapes_options_reach_it(method: str, tree: Any) -> None:
    """Guards against settings that are read and then forgotten, and methods that rule out their own ablations."""
    assert tree_of(method) == tree
    assert type(tree_of(method)) is type(tree)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("domino:depth=3", "domino takes .*pool, head, gate_table .*, not 'depth=3'"),
        ("domino:shape=fixed,beam=3", "domino takes .*breadth.*, not 'beam=3'"),
        ("eagle3:base_depth=2", "eagle3 takes .*breadth.*, not 'base_depth=2'"),
        ("eagle3:shape=dynatree,depth=4", "depth=4 contradict each other"),
        ("domino:shape=fixed,breadth=0", "breadth=0: "),
        ("eagle3:shape=gated,checkpoints=2/1/6", "checkpoints=2/1/6: must be one or more ascending numbers"),
        ("eagle3:shape=gated,kept=8/24", "kept=8/24: must be 3 ascending numbers from 1 to 60"),
        ("eagle3:shape=gated,thresholds=0.2", "thresholds=0.2: must be 3 probabilities, one for .*=1/2/6"),
        ("eagle3:shape=gated,thresholds=0.2/0.2/nan", "must be 3 probabilities"),
        ("eagle3:shape=gated,checkpoints=1/x/6", "checkpoints"),
        ("ddd:checkpoints=0/4", "checkpoints=0/4: "),
        ("ddd:shape=beam", "shape=beam: "),
        ("svip:entropy_threshold=-1", "threshold=-1: "),
        ("svip:shape=chain", "shape=chain: "),
        ("linear:shape=template", "shape=template: "),
        ("medusa:shape=star", "shape=star: "),
        ("dflash:pool=4", "dflash takes .*, not 'pool=4'"),
        ("dart:shape=beam,breadth=3,breadth=4", "breadth is given twice"),
        ("domino:shape=dynatree,low_confidence=0.95", "low_confidence"),
        ("dynatree:calibration=often", "calibration=often: "),
        ("samd:draft=magic", "draft=magic"),
        ("linear:retrieve=all", "retrieve=all"),
        ("graft:reserved=1", "reserved=1"),
    ],
)
def test_what_a_shape_does_not_take_is_refused(method: str, said: str) -> None:
    """Guards against an option of another shape that is ignored, and a bad value that fails deep in a round."""
    with pytest.raises(InvalidRequest, match=said):
        parse_method(method)


WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "does nothing with (retrieve|place)=": (
        "eagle3:place=tail", "dynatree:reserved=0.5", "domino:retrieve=suffix,warm=x",
        "domino:retrieve=suffix,matrix=private", "graft:retrieve=none,retrieve_depth=3",
        "graft:place=tail,retrieve_breadth=2", "graft-dflash:retrieve_breadth=2",
    ),
    "retrieve_depth=12: the template of place=root has 9 levels": ("graft:retrieve_depth=12",),
    "context": ("recycle:context=3", "recycle:context=0", "outpace:retrieve=suffix,context=2", "linear:context=2"),
    "statistic=depth: does nothing with history=off; leave it out": ("dynatree:statistic=depth,history=off",),
    "statistic=committed: does nothing with history=authors": ("dynatree:statistic=committed,history=authors",),
    "calibration=off: does nothing with shape=chain; leave it out": ("linear:calibration=off",),
    "calibration=off: does nothing with shape=search": ("dart:calibration=off",),
    "calibration=off: does nothing with noise=False": ("dynatree:calibration=off,noise=false",),
    "gate_table=True: does nothing with head=False; leave one of them out": ("domino:head=false,gate_table=true",),
    "pool=64: does nothing with head=False; leave one of them out": ("domino:head=false,pool=64",),
    "corpus_bias=2: does nothing with no corpus; name one with corpus=FILE": ("samd:corpus_bias=2,min_match=3",),
}  # fmt: skip


def test_options_without_effect_are_refused() -> None:
    """Guards against an ablation that is none: it would report a setting that nothing reads."""
    for complaint, texts in WITHOUT_EFFECT.items():
        for text in texts:
            with pytest.raises(InvalidRequest, match=complaint):
                parse_method(text)
