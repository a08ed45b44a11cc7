"""Command line: `python -m cluster.preflight JOB_DIR [--fleet FILE] [--check-dir DIR ...] [--read PATH ...]`, one process per rank.

By srun or torchrun as the training's ranks, with MASTER_ADDR and MASTER_PORT; or alone, on any machine.
"""

import argparse
import os
import sys
from pathlib import Path

from pretrain.ranks.world import read_world

COME_SHARE = 3
"""Of --timeout-s is how long ranks may take to come: importing torch is hundreds of MB, which a whole job reads at once."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # rank 0 says what is amiss; torch's warnings would bury it
    try:
        world = read_world()
        options.job_dir.mkdir(parents=True, exist_ok=True)
        from cluster.preflight.inspection import Inspection, Options
        from cluster.preflight.nodes import this_node

        inspection = Inspection(
            world,
            Options(
                job_dir=options.job_dir,
                fleet=options.fleet,
                scratch=options.scratch,
                shared=tuple(options.check_dir),
                read=tuple(options.read),
                is_part=options.part_of_node,
                timeout_s=options.timeout_s,
                come_s=COME_SHARE * options.timeout_s if options.come_s is None else options.come_s,
            ),
            node=this_node(),
        )
        return inspection.run()
    except (OSError, ValueError) as error:
        print(f"preflight: could not be made: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preflight",
        description="Measures each node of a job and names the bad ones in JOB_DIR/bad-nodes.",
        epilog="Exit codes: 0 sound, 3 a bad node was named, 1 the pre-flight could not be made. "
        "PREFLIGHT_GPUS=ignore: GPUs that SLURM gave need not be visible.",
    )
    parser.add_argument("job_dir", type=Path, metavar="JOB_DIR", help="where bad-nodes and preflight.jsonl are written")
    parser.add_argument("--fleet", type=Path, metavar="FILE", help="figures of earlier jobs; this job's are added")
    parser.add_argument(
        "--check-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a directory shared by all nodes that must be writable (repeatable)",
    )
    parser.add_argument(
        "--read",
        action="append",
        default=[],
        metavar="PATH",
        help="a file, or a directory with something in it, that every node must see: a dataset's manifest.json, "
        "a pretrained run (repeatable; no remote address)",
    )
    parser.add_argument(
        "--part-of-node",
        action="store_true",
        help="the job does not have all GPUs of its nodes: the bandwidth between them is only warned of, and not kept",
    )
    parser.add_argument(
        "--scratch",
        default=os.environ.get("NODE_SCRATCH") or "/tmp",
        metavar="DIR",
        help="the directory on each node's own disk (default: NODE_SCRATCH, or /tmp)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=os.environ.get("PREFLIGHT_TIMEOUT_S") or "60",
        metavar="S",
        help="how long a rank may take to check its node (default: PREFLIGHT_TIMEOUT_S, or 60)",
    )
    parser.add_argument(
        "--come-s",
        type=float,
        metavar="S",
        help=f"how much later than rank 0 another may come, or it than they (default: {COME_SHARE} times --timeout-s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
