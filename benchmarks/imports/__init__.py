"""Published layouts of drafters, imported and compared with a forward written from the layout.

``python -m benchmarks.imports --out benchmarks/results/imports_<hardware>_<yyyymm>.md``
"""
