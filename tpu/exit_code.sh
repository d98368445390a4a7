#!/bin/sh
# Runs a command and writes its exit code into the file that $XLA_ZOO_EXIT_CODE names, also where a signal ended it
# (128 and the signal's number): make, which started this, reports 2 for every failure.
#
#     XLA_ZOO_EXIT_CODE=/run/code sh tpu/exit_code.sh python -m train.glue tiny
#
# A signal that reaches all processes (systemctl kill, kill -TERM -1) ends the command, and this only afterwards.
trap : HUP INT TERM
"$@"
code=$?
echo "$code" >"$XLA_ZOO_EXIT_CODE"
exit "$code"
