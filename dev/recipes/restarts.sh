#!/bin/bash
# A run on one machine that starts again by itself when a rank fails or is killed:
#
#     RANKS=8 bash dev/recipes/restarts.sh --data my_shards --out runs/mine
#
# torchrun then ends all ranks and starts them again, and --resume auto goes on at the newest
# checkpoint: at most --save_every steps are done twice, with the same rows.
#
# A loop of your own needs what train.py does when it makes the group of ranks: after a restart, the
# store of torch 2.13's torchrun still has the keys of the last attempt, and gloo hangs in more than
# half of all restarts. PrefixStore(f"attempt_{TORCHELASTIC_RESTART_COUNT}", store) gives each attempt
# its own keys.

# --signals-to-handle: otherwise, SIGUSR1 ends only torchrun. (train.py then saves and stops, but other
# loops run on.) torchrun would also handle a SIGHUP that nohup made the shell ignore: leave it out then.
# --shutdown-timeout: otherwise, a rank that still saves after 30 s is killed.
signals=SIGTERM,SIGINT,SIGQUIT,SIGUSR1
if [ -z "$(trap -p SIGHUP)" ]; then    # not ignored
    signals=$signals,SIGHUP
fi
exec torchrun --standalone --nproc_per_node="${RANKS:-2}" --max-restarts="${RESTARTS:-9}" \
    --signals-to-handle="$signals" --shutdown-timeout=600 \
    "${TRAIN:-train.py}" --resume auto "$@"
