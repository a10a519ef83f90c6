"""How every number of this project was made: timing, ceilings, peers, counters, recordings.

`timing` says what a time is, `peers` who is timed, `counters` what crossed the memory bus,
`recording` how a run is kept, `figures` how it is drawn, and `bench` puts them together behind
`python -m rmsnorm_ref bench`. Importing any of them touches neither CUDA nor Triton nor a peer.
"""
