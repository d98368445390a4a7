"""A grid: ordinary runs over all combinations of some flags' values, and a table with their spread.

    make grid MODEL=bert TASK=mrpc ARGS="--lr 2e-5 3e-5 5e-5 --seed 0 1 2"
    python -m train.grid glue tiny --lr 1e-3 2e-3 --seed 0 1 2

    __main__.py  the command line, and the order of it all
    flags.py     which flags a script has, read from its text
    axes.py      which of them vary, and the runs that follow from that
    check.py     what the script itself says of each run, before the first one starts
    places.py    where runs run: this machine, or TPUs by `python3 -m tpu.launch`
    records.py   what is known of each run, and the files of the grid
    table.py     median, mean and deviation over the seeds, and which configuration is best

A grid is started with TPU= from a machine that has no environment. So all files but check.py need
python3 alone (3.9 or later, only the standard library).
"""
