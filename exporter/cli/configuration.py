"""The configuration: what a user may set, with its defaults, as plain dataclasses.

The loader (file:line:column errors), `config.schema.json`, `config.example.yaml` and the documentation are
all made from these definitions. The comment of a field in the example is its metadata's `help`. Durations are
seconds in the code and `500ms 15s 1m30s 1h` in the file.
"""
