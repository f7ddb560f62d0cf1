#!/bin/bash
# Jobs that follow one another, for clusters that do not let a job requeue itself:
#   jobs/chain.sh 5 jobs/train.sbatch [more flags of hybrid train]
# Each starts when the one before has ended, however it ended, and goes on from the newest
# checkpoint. Those left when the training has ended find nothing to do and end at once; scancel
# them, and all of them after a failure that a new start does not mend.
set -euo pipefail

if (($# < 2)) || [[ ! $1 =~ ^[1-9][0-9]*$ || ! -f $2 ]]; then
    echo "usage: jobs/chain.sh NUMBER SCRIPT [flags of hybrid train]" >&2
    exit 2
fi
number=$1
shift

site=()  # SITE: options of sbatch for every job, such as (--partition=gpu --account=project)
export MAX_REQUEUES=0  # read by the scripts in jobs/: the next job goes on, not the same one
before=
for ((i = 1; i <= number; i++)); do
    after=()
    if [[ -n $before ]]; then after=("--dependency=afterany:$before"); fi
    before=$(sbatch --parsable ${site[@]+"${site[@]}"} ${after[@]+"${after[@]}"} "$@")
    before=${before%%;*}
    echo "$before"
done
