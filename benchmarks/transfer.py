"""What transfer costs: probing (transfer_probe.py), fine-tuning (transfer_tune.py), evaluation
(transfer_evaluate.py), in turn.

.venv/bin/python benchmarks/transfer.py [--quick]
"""

import subprocess
import sys
from pathlib import Path

PARTS = ("transfer_probe.py", "transfer_tune.py", "transfer_evaluate.py")

if __name__ == "__main__":
    for part in PARTS:
        subprocess.run(
            [sys.executable, str(Path(__file__).with_name(part)), *sys.argv[1:]], check=True
        )
