#!/bin/bash
# Trains examples/resume/train_resume.py on two nodes, one rank a GPU, and goes on
# after each interruption until the training is done.
#
#     mkdir -p logs && sbatch examples/slurm/train_resume.sh --epoch 200
#
# Submit it from the root of the repository; arguments go to the program. Change the
# lines that begin with #SBATCH and the variables below to what your cluster has.
#
#SBATCH --job-name=chainermn-ng
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
# May be put back into the queue, by Slurm when it needs the nodes or by this script.
#SBATCH --requeue
# 120 s before the time limit all ranks get SIGTERM; at a preemption they get it from
# Slurm, GraceTime (of the partition or QOS) before the end.
#SBATCH --signal=TERM@120

set -euo pipefail

VENV="${VENV:-$PWD/.venv}"
OUT="${OUT:-$PWD/result/resume}" # on a file system that all nodes see
# How srun starts the ranks: pmix for Open MPI, pmi2 for MPICH and its relatives;
# "srun --mpi=list" shows what this cluster has. An MPI library that does not know Slurm,
# such as pip's, is started by its own mpiexec instead: MPI_TYPE=mpiexec. Then it depends
# on that mpiexec whether the signal reaches the ranks; what --interval saved is there.
MPI_TYPE="${MPI_TYPE:-pmix}"

if [[ -f "$VENV/bin/activate" ]]; then
    # shellcheck source=/dev/null
    source "$VENV/bin/activate"
fi

# A rank takes the GPU of its number on the node (chainermn_ng.choose_device), so each
# must see all GPUs of its node: no --gpus-per-task and no --gpu-bind here.
program=(python examples/resume/train_resume.py --out "$OUT" "$@")
if [[ -n "${SLURM_GPUS_ON_NODE:-}" ]]; then
    program+=(--gpu --communicator pure_nccl)
fi

# Slurm may send the signal to this shell, too. It has to outlive the ranks.
trap : TERM

status=0
if [[ "$MPI_TYPE" == mpiexec ]]; then
    mpiexec -n "$SLURM_NTASKS" "${program[@]}" || status=$?
else
    # A step gets the cores of its tasks only when asked for them again. All ranks end
    # together; where one dies instead, the others are ended 60 s later.
    srun --mpi="$MPI_TYPE" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        --kill-on-bad-exit=0 --wait=60 "${program[@]}" || status=$?
fi

# 75: the ranks have saved a snapshot and there is more to do.
if [[ "$status" -eq 75 ]]; then
    echo "interrupted: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"
