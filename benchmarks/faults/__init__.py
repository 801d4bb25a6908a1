"""What becomes of specdec's commands under SIGKILL, flipped bits, bad inputs, full disks and hostile directories.

``python -m benchmarks.faults --out benchmarks/results/faults_<hardware>_<yyyymm>.md``
"""
