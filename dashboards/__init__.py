"""Grafana dashboards as code.

`python -m dashboards` writes the JSON files of `dashboards/json/`. The package is not installed with the exporter. Each
dashboard is a module that lists its panels in reading order. `panels` and `tables` build panels, `board` lays out the
panels, and `text/` contains the panel descriptions. `queries` expands selectors such as `@run`, and explains the PromQL
forms that the queries share.
"""
