"""Recorded training steps, replayed on a model of a GPU: what this library and FSDP2 would do at any number of ranks.

recording     what a step launches: operators with bytes and flops, collectives, events, waits, allocations
queue         replays a recording in an event queue, on given durations and contention
machine       durations: a roofline, bandwidths of copies and collectives, calibrated on one published row
models        the models, the libraries and their placements, and recordings of any number of layers
lab           steps measured in the lab (`tools/lab`), next to their replay
predict       the tables and figures of docs/gpu_expectations.md: `python -m tools.replay`
"""
