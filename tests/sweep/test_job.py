import json

import pytest

from specdec.sweep.job import Job

JOB = Job(
    key="k1", kind="fit", label="K=4 seed=1: fit", command=("fit", "--out", "d"), directory="d", done="DONE.json",
    needs=("c1",), resumes=True, threads=2, memory_bytes=10**9,
)  # fmt: skip


def test_lossless_through_json():
    assert Job.from_json(json.loads(json.dumps(JOB.to_json())), "job.json") == JOB


@pytest.mark.parametrize(
    "change",
    [{"kind": "train"}, {"threads": 0}, {"threads": True}, {"command": "fit"}, {"key": ""}, {"needs": [1]}],
)
def test_refuses_what_is_no_job(change):
    with pytest.raises(ValueError, match=f"job.json.*{next(iter(change))}"):
        Job.from_json(JOB.to_json() | change, "job.json")


def test_refuses_a_missing_key():
    data = JOB.to_json()
    del data["done"]
    with pytest.raises(ValueError, match="done"):
        Job.from_json(data, "job.json")
