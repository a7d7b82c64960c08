"""The report of a set of runs: `python -m normexp.report PATH [--out DIR]`.

study.py groups runs into cells, tables.py and figures.py say what is known of them, build.py writes it all. It knows a
run only by its folder; of the modules here only canvas.py imports matplotlib.
"""
