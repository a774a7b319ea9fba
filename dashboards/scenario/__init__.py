"""A small cluster to try dashboards on: real exporters, real processes, the real Prometheus, described GPUs.

Six machines in one: two with eight H100 of which one becomes hot and one is lost, one without GPUs whose exporter is
killed for a while, one with divided A100, two more with H100. On the first two a run of four ranks pauses, saves,
validates, meets a number that is none, has a straggler, crashes and goes on; on the last two a second run, the baseline,
has none of that. Everything is ended by leaving the context manager. When it is killed instead, the ranks see their
standard input close; the exporters and Prometheus go on until somebody ends them.
"""
