"""A cell eager and compiled, in a process of its own. Prints how the compiler's cache answered."""

import sys
from dataclasses import replace
from pathlib import Path

from torch._dynamo.utils import counters

from tests import tiny
from tests.test_trainer import train
from tests.tiny import VOLATILE

folder = Path(sys.argv[1])
settings = replace(tiny.TRAIN, steps=20)
for norm in ("rms", "ln", "bn"):
    rows: dict[bool, list[dict]] = {False: [], True: []}
    for wanted, own in rows.items():
        (folder / f"{norm}-{wanted}").mkdir(parents=True)
        trainer = tiny.trainer(norm, train=replace(settings, compile=wanted), depth=2)
        train(trainer, folder / f"{norm}-{wanted}", own)
    worst = 0.0
    for eager, compiled in zip(rows[False], rows[True], strict=True):
        assert eager.keys() == compiled.keys()
        for path in eager.keys() - VOLATILE:
            if path.startswith("grad_norm") and eager[path] > 1e-4:
                worst = max(worst, abs(compiled[path] / eager[path] - 1))
    facts = trainer.compiled.facts()
    print(f"{norm}: gradient norms part by {worst:.1e}, {facts}")
    assert worst < 1e-4
    assert facts["graph_breaks"] == facts["recompilations"] == 0
inductor = counters["inductor"]
print(f"hits {inductor['fxgraph_cache_hit']} misses {inductor['fxgraph_cache_miss']}")
