"""Measures every node before training, and names those that would spoil it: `python -m cluster.preflight JOB_DIR`, one per rank.

1. Each rank forks a worker that touches GPU and disks; the rank itself only talks and waits, so that nothing that hangs can
   silence it (worker.py). Ranks meet in a TCPStore of rank 0, where one that never comes is missed (meeting.py).
2. The workers measure their own device, directories and settings (checks.py); the ranks hand the figures to rank 0.
3. If these are sound, links are measured: within each node, between neighbouring nodes, and all together (links.py).
4. Rank 0 judges (judgement.py, a pure function of the figures and of the fleet's history) and writes JOB_DIR/bad-nodes,
   JOB_DIR/preflight.jsonl and the fleet's file (records.py), prints the table (table.py), and tells all ranks how to exit.

Exit codes: 0 sound, or nothing that can be pinned on a node; 3 a bad node was named; anything else: it could not be made.
"""
