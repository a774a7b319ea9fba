"""Dashboards: the JSON is the code's, every panel is complete, every name in a query exists, colours stay apart."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboards_support import (
    MODELS,
    OF_PROMETHEUS,
    ROOT,
    asked,
    everything,
    families,
    filled,
    grouped,
    records,
    selectors,
)

from dashboards.board import COLUMNS, panels_of
from dashboards.palette import CAUSES, COMPONENTS, CYCLE
from dashboards.texts import texts_of

UIDS = sorted(MODELS)
TEXTS = {uid: json.dumps(model) for uid, model in MODELS.items()}

every_board = pytest.mark.parametrize("uid", UIDS)

WITHOUT_VARIABLES = {
    "training-fleet": "all runs and nodes, by its purpose",
    "Carbon intensity": "the grid's number is the site's, not a run's",
    "Settings in force": "prices and intensities are the site's, not a run's",
}


def properties(panel: dict[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = panel["fieldConfig"]["defaults"]
    return defaults


def test_the_committed_json_is_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dashboards", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, f"run `python -m dashboards`\n{done.stdout}{done.stderr}"


def test_a_file_that_somebody_edited_by_hand_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "dashboards" / "json", tmp_path / "json")
    path = tmp_path / "json" / "training-run.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace('"editable": false', '"editable": true'), encoding="utf-8"
    )
    (tmp_path / "json" / "old.json").write_text("{}", encoding="utf-8")

    from dashboards.__main__ import differences

    found = list(differences(tmp_path / "json"))
    assert '-  "editable": true,' in found or any('"editable": true' in line for line in found)
    assert any(line.startswith("--- old.json") for line in found)


def test_the_six_dashboards_are_there_with_uids_for_good() -> None:
    assert UIDS == [
        "training-energy",
        "training-fleet",
        "training-gpus",
        "training-node",
        "training-ranks",
        "training-run",
    ]
    assert len({model["title"] for model in MODELS.values()}) == len(MODELS)


@every_board
def test_a_dashboard_keeps_the_house_rules(uid: str) -> None:
    model = MODELS[uid]

    assert model["schemaVersion"] == 39, "Grafana 10.4's; older ones read it, later ones convert it"
    assert model["editable"] is False
    assert model["graphTooltip"] == 1
    assert model["refresh"]
    assert model["tags"] == ["training-exporter"]
    assert model["description"].endswith((".", "?"))
    assert "__inputs" not in model, "provisioned files have none"
    assert all(link["keepTime"] and link["includeVars"] for link in model["links"])
    assert len({panel["title"] for panel in panels_of(model)}) == len(panels_of(model)), "titles name panels"


@every_board
def test_variables_are_refreshed_with_the_time_range_and_use_the_chosen_data_source(uid: str) -> None:
    first, *others = MODELS[uid]["templating"]["list"]

    assert (first["type"], first["name"], first["query"]) == ("datasource", "datasource", "prometheus")
    for variable in others:
        assert variable["refresh"] == 2
        assert variable["datasource"]["uid"] == "${datasource}"
        assert variable["description"]


@every_board
def test_panels_stand_beside_each_other_and_not_on_each_other(uid: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in MODELS[uid]["panels"]:
        place = panel["gridPos"]
        cells = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            )
        )

        assert place["x"] + place["w"] <= COLUMNS
        assert not cells & taken, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in panels_of(MODELS[uid])]
    assert len(set(numbers)) == len(numbers)


@every_board
def test_a_panel_says_what_it_shows_what_bad_is_and_what_to_do(uid: str) -> None:
    for panel in panels_of(MODELS[uid]):
        what, bad, do, gap = panel["description"].split("\n\n")

        assert len(what) > 10
        assert bad.startswith("**Bad:** ")
        assert do.startswith("**What to do:** ")
        assert gap.startswith("**A gap or no data:** ")
        assert all(part.endswith((".", "!", "?")) for part in (what, bad, do, gap)), panel["description"]


@every_board
def test_a_title_is_a_noun(uid: str) -> None:
    titles = [panel["title"] for panel in panels_of(MODELS[uid])]

    assert [title for title in titles if title.endswith((".", "?")) or not title[0].isupper()] == []


@every_board
def test_every_text_belongs_to_a_panel(uid: str) -> None:
    assert set(texts_of(uid)) == {panel["title"] for panel in panels_of(MODELS[uid])}


def test_a_text_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A\n\n### Loss\n\nWhat it is.\n\n**Bad:** a rise.\n\n**Empty:** none\n")

    with pytest.raises(ValueError, match="Loss: missing What to do"):
        texts_of("a", tmp_path)


@every_board
def test_a_panel_has_a_unit_and_says_why_it_is_empty(uid: str) -> None:
    for panel in panels_of(MODELS[uid]):
        assert properties(panel)["unit"]
        assert properties(panel)["noValue"]
        if panel["type"] != "stat":
            assert len(properties(panel)["noValue"]) > 5, "a sentence, not a dash"


@every_board
def test_no_line_is_drawn_over_a_gap(uid: str) -> None:
    for panel in panels_of(MODELS[uid]):
        custom = properties(panel).get("custom", {})

        if panel["type"] in {"timeseries", "state-timeline"}:
            assert custom["spanNulls"] is False
            assert custom["insertNulls"] is False
        assert '"nullPointMode"' not in json.dumps(panel)


@every_board
def test_a_number_is_asked_for_at_the_end_of_the_range_and_not_the_last_of_a_series(uid: str) -> None:
    for panel in panels_of(MODELS[uid]):
        if panel["type"] in {"stat", "bargauge", "table"}:
            assert all(target["instant"] for target in panel["targets"]), (
                "the last of a series may be an hour old"
            )


@every_board
def test_a_panel_asks_the_chosen_data_source_with_its_own_step(uid: str) -> None:
    for panel in panels_of(MODELS[uid]):
        assert panel["targets"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        assert "interval" not in panel, "a panel's minimal step breaks $__rate_interval"


@every_board
def test_every_name_in_a_query_exists(uid: str) -> None:
    for one in everything(uid):
        known = families() | OF_PROMETHEUS | dict.fromkeys(records(), None)
        used = selectors(one.expression)

        assert used
        for name, matched in used:
            assert name in known, f"{name} is neither in docs/METRICS.md nor made by a rule"
            labels = known[name]
            if labels is not None:
                assert matched <= labels | {"job", "instance", "le"}, f"{name} has {sorted(labels)}"


@every_board
def test_every_label_that_is_grouped_by_is_one_of_the_families_or_made_here(uid: str) -> None:
    for one in everything(uid):
        known = families() | OF_PROMETHEUS
        names = [name for name, _ in selectors(one.expression)]
        if any(name not in known for name in names):
            continue  # labels of recorded series are the rules'
        there = {"job", "instance", "le"}.union(*(known[name] for name in names))
        made = set(re.findall(r'label_replace\([^"]*"(\w+)"', one.expression)) | set(
            re.findall(r', "(\w+)", "', one.expression)
        )

        assert grouped(one.expression) <= there | made


@every_board
def test_every_query_follows_the_variables(uid: str) -> None:
    for one in asked(uid):
        if uid in WITHOUT_VARIABLES or one.panel in WITHOUT_VARIABLES:
            continue
        names = set(re.findall(r"\$(\w+)", one.expression))

        assert names & {"node", "run", "baseline"}, str(one)


@every_board
def test_a_variable_of_one_value_is_compared_as_it_is_and_one_of_several_as_a_pattern(uid: str) -> None:
    several = {
        variable["name"]: variable["multi"]
        for variable in MODELS[uid]["templating"]["list"]
        if variable["type"] == "query"
    }
    for one in everything(uid):
        for sign, name in re.findall(r'(=~|=)"\$(\w+)"', one.expression):
            assert (sign == "=~") == several[name], f"{one}: a run may be called lr+wd(3)"


@every_board
def test_rates_look_over_an_interval_that_follows_the_zoom(uid: str) -> None:
    for one in asked(uid):
        for window in re.findall(r"\b(?:rate|irate|increase)\([^[]*\[([^]]*)\]", one.expression):
            assert window in {"$__rate_interval", "$__range", "5m"}, str(one)


def test_the_fleet_is_asked_for_by_recorded_series_only() -> None:
    of_chosen_runs = {panel["title"] for panel in MODELS["training-fleet"]["panels"][-1]["panels"]}
    for one in asked("training-fleet"):
        if one.panel in of_chosen_runs:
            continue
        for name, _ in selectors(one.expression):
            assert ":" in name or name.startswith("ALERTS"), f"{one}: {name}"


def test_all_dashboards_but_the_fleet_need_no_rules() -> None:
    for uid in set(UIDS) - {"training-fleet"}:
        for one in asked(uid):
            assert not [name for name, _ in selectors(one.expression) if ":" in name], str(one)


@every_board
def test_links_lead_to_dashboards_and_variables_that_exist(uid: str) -> None:
    for target, query in re.findall(r"/d/([\w-]+)\?([^\"]*)", TEXTS[uid]):
        assert target in MODELS, target
        variables = {variable["name"] for variable in MODELS[target]["templating"]["list"]}
        assert set(re.findall(r"var-(\w+)=", query)) <= variables
        assert "${__url_time_range}" in query
        assert "${datasource:queryparam}" in query
        assert all(value.endswith(":percentencode}") for value in re.findall(r"var-\w+=([^&\"]*)", query)), (
            "Grafana puts a value in as it is: a `+` would be a blank, a `#` the end"
        )


@every_board
def test_a_link_from_a_cell_names_a_column_that_the_table_has(uid: str) -> None:
    for panel in panels_of(MODELS[uid]):
        titles = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}

        for name in re.findall(r"\$\{__data\.fields\.(\w+)", json.dumps(panel)):
            assert name in titles


@every_board
def test_a_table_hides_what_has_no_heading(uid: str) -> None:
    for panel in panels_of(MODELS[uid]):
        steps = {step["id"]: step["options"] for step in panel.get("transformations", ())}
        if "organize" in steps and "groupingToMatrix" not in steps:
            letters = [target["refId"] for target in panel["targets"]]
            values = {"Value"} if len(letters) == 1 else {f"Value #{letter}" for letter in letters}
            assert values <= set(steps["organize"]["renameByName"]) | set(steps["organize"]["excludeByName"])


@every_board
def test_colours_are_those_of_the_palette(uid: str) -> None:
    for panel in panels_of(MODELS[uid]):
        from dashboards import palette

        allowed = {
            color
            for value in vars(palette).values()
            for color in (
                value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
            )
            if isinstance(color, str)
        }

        for color in re.findall(r'"(?:fixedColor|color)": "([^"]+)"', json.dumps(panel)):
            assert color in allowed, color
        assert "palette-classic" not in json.dumps(panel)


PROTANOPIA = (
    (0.152286, 1.052583, -0.204868),
    (0.114503, 0.786281, 0.099216),
    (-0.003882, -0.048116, 1.051998),
)
DEUTERANOPIA = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.01182, 0.04294, 0.968881),
)
TRITANOPIA = ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039))
NORMAL = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
"""How the three kinds of colour blindness mix linear red, green and blue (Machado, Oliveira, Fernandes 2009)."""


def linear(color: str) -> tuple[float, float, float]:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return red, green, blue


def lab(rgb: tuple[float, ...]) -> tuple[float, float, float]:
    red, green, blue = (min(1.0, max(0.0, part)) for part in rgb)
    white = (0.95047, 1.0, 1.08883)
    xyz = (
        0.4124564 * red + 0.3575761 * green + 0.1804375 * blue,
        0.2126729 * red + 0.7151522 * green + 0.0721750 * blue,
        0.0193339 * red + 0.1191920 * green + 0.9503041 * blue,
    )
    x, y, z = (
        (part / of) ** (1 / 3) if part / of > 0.008856 else 7.787 * part / of + 16 / 116
        for part, of in zip(xyz, white, strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(color: str, eyes: tuple[tuple[float, float, float], ...]) -> tuple[float, float, float]:
    rgb = linear(color)
    return lab(tuple(sum(a * b for a, b in zip(row, rgb, strict=True)) for row in eyes))


def distance(one: str, other: str, eyes: tuple[tuple[float, float, float], ...]) -> float:
    return math.dist(seen(one, eyes), seen(other, eyes))


@pytest.mark.parametrize(
    "eyes", [NORMAL, PROTANOPIA, DEUTERANOPIA, TRITANOPIA], ids=["normal", "protan", "deutan", "tritan"]
)
@pytest.mark.parametrize(
    "colors",
    [CYCLE[:8], tuple(COMPONENTS.values()), tuple(CAUSES.values())],
    ids=["cycle", "components", "causes"],
)
def test_colours_that_stand_together_stay_apart_for_all_eyes(
    colors: tuple[str, ...], eyes: tuple[tuple[float, float, float], ...]
) -> None:
    nearest = min(
        (distance(one, other, eyes), one, other) for one, other in itertools.combinations(colors, 2)
    )

    assert nearest[0] > 8, nearest  # 2.3 is a just noticeable difference


@pytest.mark.parametrize("color", CYCLE)
@pytest.mark.parametrize("ground", ["#181B1F", "#FFFFFF"], ids=["dark", "light"])
def test_a_line_can_be_seen_on_both_grounds(color: str, ground: str) -> None:
    def luminance(of: str) -> float:
        red, green, blue = linear(of)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(color), luminance(ground)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) > 2


@pytest.mark.skipif(shutil.which("promtool") is None, reason="install Prometheus: apt-get install prometheus")
def test_every_query_is_valid_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{place}", "expr": filled(one.expression)}
        for place, one in enumerate(one for uid in UIDS for one in everything(uid))
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}), encoding="utf-8")

    done = subprocess.run(
        ["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@pytest.mark.parametrize("kind", ["dashboards", "datasources"])
def test_provisioning_files_say_what_grafana_expects(kind: str) -> None:
    paths = sorted((ROOT / "dashboards" / "provisioning" / kind).glob("*.yaml"))

    assert paths
    for path in paths:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert content["apiVersion"] == 1
        entries = content["providers" if kind == "dashboards" else "datasources"]
        assert entries
        for entry in entries:
            if kind == "dashboards":
                assert entry["type"] == "file"
                assert entry["options"]["path"].startswith("/")
                assert (entry["disableDeletion"], entry["allowUiUpdates"]) == (True, False)
            else:
                assert entry["type"] == "prometheus"
                assert entry["jsonData"]["timeInterval"], "without it $__rate_interval is wrong"
                assert entry["url"].startswith(("http://", "https://", "$"))
