"""Timeline marks of parts of commlib other than operations: buckets, codecs, packing, pipelines."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from commlib.compress.codecs.quantise import QSGD
from commlib.compress.codecs.sparse import RandomK, TopK
from commlib.compress.scheme import BucketPart
from commlib.compress.schemes.all_gather import AllGather
from commlib.compress.schemes.all_to_all import AllToAll
from commlib.compress.schemes.power_sgd import PowerSGD
from commlib.coordinator import Coordinator, OpRequest
from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.data_parallel.buckets import Parameter, make_buckets
from commlib.pipeline.runner import Runner
from commlib.pipeline.schedule import chain, make, verify
from tests.bodies.loopback import run
from tests.bodies.pipelines import ArrayStage, ArrayTensors, batch_of

TINY = 64 / 2**20


def marks(tmp_path: Any, work: Any, *, size: int = 2) -> list[Counter[Any]]:
    """Return the marks that each rank writes during some work: the count of each (category, name, phase)."""

    def rank(comm: Any) -> None:
        comm.runtime.recording.start_timeline(str(tmp_path / "{rank}.json"), comm.rank)
        work(comm)
        comm.runtime.recording.stop_timeline()

    run(size, rank)
    marks_ = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    kinds = ("bucket", "codec", "pack", "step", "pipeline")
    return [Counter((e["cat"], e["name"], e["ph"]) for e in events if e.get("cat") in kinds) for events in marks_]


@pytest.mark.parametrize("early", [0, 2])
def test_buckets_have_spans_from_launch_to_end(tmp_path, early):
    def work(comm):
        specs = [Parameter(name, 8, "float64", 8) for name in "abc"]
        engine = BucketReducer(comm, make_buckets(specs, first_bucket_mib=TINY, bucket_cap_mib=TINY))
        assert len(engine.buckets) == 3
        for _ in range(2):
            engine.traces.ready(2)
            for bucket in range(early):
                engine.launch(bucket)
            engine.finish(range(early, 3))

    for marks_ in marks(tmp_path, work):
        for bucket in range(3):
            assert (
                marks_["bucket", f"bucket {bucket} launched", "b"]
                == 2
                == marks_["bucket", f"bucket {bucket} launched", "e"]
            )
        assert marks_["bucket", "bucket 2 ready", "b"] == 2 == marks_["bucket", "bucket 2 ready", "e"]
        assert marks_["step", "step", "i"] == 2


@pytest.mark.parametrize(
    ("scheme", "steps"),
    [
        (AllToAll(QSGD()), {"encode", "add up", "decode"}),
        (AllGather(TopK(0.5)), {"encode", "decode"}),
        (AllGather(RandomK(0.5)), {"encode", "decode"}),
        (PowerSGD(rank=1, start=0), {"encode", "project back", "decode"}),
    ],
)
def test_codecs_have_spans(tmp_path, scheme, steps):
    def work(comm):
        reducer = scheme.reducer(comm, [BucketPart("w", 0, (64, 64))])
        reducer.reduce(np.ones(64 * 64, np.float32), np.ones(3, np.float32))

    for marks_ in marks(tmp_path, work):
        assert marks_ == {("codec", step, phase): 1 for step in steps for phase in "BE"}


def test_named_arrays_are_packed_and_unpacked(tmp_path):
    def work(comm):
        coordinator = Coordinator(comm, range(comm.size))
        try:
            arrays = [np.ones(3, np.float32) for _ in range(4)]
            requests = [OpRequest("allreduce", f"g{n}", (("float32", (3,)),), (("op", "sum"),)) for n in range(4)]
            pending = [coordinator.submit(one, [x], [x]) for one, x in zip(requests, arrays, strict=True)]
            for one in pending:
                one.wait()
            assert all(x.tolist() == [2, 2, 2] for x in arrays)
        finally:
            coordinator.close()

    for marks_ in marks(tmp_path, work):
        counts = [marks_["pack", what, phase] for what in ("pack", "unpack") for phase in "BE"]
        assert counts[0] >= 1 and len(set(counts)) == 1


def test_actions_of_a_pipeline_have_spans(tmp_path):
    schedule = make("1f1b", 2, 3)
    links = chain(schedule.stages)
    lowered = verify(schedule, links, reduce=True)

    def work(comm):
        stages = {stage: ArrayStage(stage, links, batch_of) for stage in schedule.stages_of(comm.rank)}
        runner = Runner(comm, lowered, stages, ArrayTensors())
        runner.run()
        runner.spans = []
        runner.run()
        assert len(runner.spans) == len(lowered.schedule.programs[comm.rank])
        runner.close()

    for rank, marks_ in enumerate(marks(tmp_path, work)):
        names = Counter(str(action) for action in lowered.schedule.programs[rank])
        expected = {("pipeline", name, phase): 2 * count for name, count in names.items() for phase in "BE"}
        assert marks_ == expected | {("step", "step", "i"): 2}
