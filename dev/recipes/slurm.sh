#!/bin/bash
# train.py on the nodes of a Slurm cluster. Edit the two lines of numbers, then:
#
#     sbatch dev/recipes/slurm.sh --data my_shards --out runs/mine
#
# Submit it several times: jobs of one name run one after another (singleton), and each resumes where
# the one before it stopped. srun sets neither RANK nor WORLD_SIZE; without them, the loader raises an
# error. MPICH's mpiexec names them PMI_RANK, PMI_SIZE, and the local ones MPI_LOCALRANKID,
# MPI_LOCALNRANKS.
#SBATCH --job-name=nanoloader --dependency=singleton --open-mode=append
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8
#SBATCH --cpus-per-task=12 --time=24:00:00
#SBATCH --signal=USR1@600
# USR1@600: ten minutes before the time is up, the ranks get SIGUSR1, save and stop.

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))    # jobs that share a node do not meet

# --cpus-per-task: srun does not take it over from sbatch (Slurm 22.05 and newer), and the default is
# one CPU for each rank. --kill-on-bad-exit: otherwise, when a rank fails, the others wait for it.
# exec: Slurm's signals reach Python. --threads: whether or not Slurm binds the ranks to their CPUs.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec python train.py --threads "$SLURM_CPUS_PER_TASK" --resume auto "$@"' train "$@"
