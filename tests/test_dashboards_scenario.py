"""Every query of every dashboard against the real Prometheus, which has scraped real exporters and a real job.

The scenario is played once: four machines, two runs, a pause, a straggler, a crash, heat, a lost GPU, a dead exporter.
A query gives data, or stands on the list below with the reason why it cannot here.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboards_support import MODELS, Served, asked, filled

from dashboards.board import panels_of
from dashboards.scenario.cluster import BASELINE, RUN, Cluster
from dashboards.scenario.timeline import Timeline

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="install Prometheus: apt-get install prometheus"
    ),
]

SECONDS = 80.0

VIRTUAL = "virtual machines have no such hardware"
NO_MOUNT = "neither NFS nor Lustre is mounted where tests run"
NO_FAULT = "nothing of the kind goes wrong in the scenario: good is empty here"
NO_TORCH = "the scenario's job waits instead of computing, without torch"
REPLAYED = "processes of a described GPU are described too, and none of the job's"
OTHER_CARDS = "of older cards; the scenario's are H100"
NOT_DIVIDED = "of divided GPUs; node-2's are whole (node-4's are looked at by themselves)"
NO_LIMIT = "only in a container with such a limit"

WITHOUT_DATA: dict[str, str] = {}
"""Panel, or panel and letter of its query → why it may be empty."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("scenario"), Timeline(seconds=SECONDS)) as playing:
        playing.wait()
        time.sleep(2)
        yield playing


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Served:
    return Served(cluster.url, cluster.started, cluster.started + SECONDS)


CHOSEN = {
    "training-run": {"run": RUN},
    "training-ranks": {"run": RUN, "rank": "3"},
    "training-gpus": {"node": "node-2"},
    "training-node": {"node": "node-1"},
    "training-compare": {"perf_tag": "llama-7b-bf16"},
}


@pytest.mark.parametrize("uid", sorted(MODELS))
def test_every_query_gives_data_or_is_on_the_list(uid: str, served: Served) -> None:
    values = served.values(MODELS[uid]) | CHOSEN.get(uid, {})
    empty = [
        f"{one}: {filled(one.expression, values)}"
        for one in asked(uid)
        if one.panel not in WITHOUT_DATA
        and f"{one.panel} {one.letter}" not in WITHOUT_DATA
        and not served.answer(one, values)
    ]

    assert not empty, "\n".join(empty)
