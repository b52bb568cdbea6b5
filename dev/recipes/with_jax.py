"""
Train with JAX, in one process or in several:

    python dev/recipes/with_jax.py my_shards
    COORDINATOR=host:1234 RANK=0 WORLD_SIZE=2 python dev/recipes/with_jax.py my_shards    # and RANK=1

Stop it at any time, even during a save. The same command resumes, on any number of processes. The
loader needs torch, but not torch.distributed: each process passes its rank.
"""

import json
import os
import pickle
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader, merge_states
from dataset import find_data, write_atomic
from tokenizer import find_tokenizer

rows_per_step, T = 8, 128    # of all processes together
n_steps, save_every = 40, 10
checkpoints = Path("with_jax")

if "COORDINATOR" in os.environ:    # on a TPU pod or under Slurm, initialize() needs no arguments
    jax.distributed.initialize(os.environ["COORDINATOR"], int(os.environ["WORLD_SIZE"]),
                               int(os.environ["RANK"]))
rank, world_size = jax.process_index(), jax.process_count()
data = find_data(*sys.argv[1:])
tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)
loader = PackedLoader(tokenizer, rows_per_step // world_size, T, "train", data_dir=data,
                      rank=rank, world_size=world_size)
sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))

def loss_of(params, inputs, targets):
    logits = params["embedding"][inputs] @ params["head"]
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None].clip(0), -1)[..., 0]
    n_targets = jnp.sum(targets >= 0)    # masked targets are -100
    return jnp.sum(nats * (targets >= 0)) / jnp.maximum(1, n_targets)

@jax.jit
def train_step(params, inputs, targets):
    loss, gradient = jax.value_and_grad(loss_of)(params, inputs, targets)
    return jax.tree.map(lambda p, g: p - 5.0 * g, params, gradient), loss

draw = np.random.default_rng(0)
n = tokenizer.get_vocab_size()
params = {"embedding": draw.normal(size=(n, 64)), "head": draw.normal(size=(64, n)) / 8}
params = jax.tree.map(lambda x: np.float32(x), params)

# Resume from the newest folder with a loader.json, which is written last
start = max((int(path.parent.name) for path in checkpoints.glob("*/loader.json")), default=0)
if start:
    folder = checkpoints / f"{start}"
    params = pickle.loads((folder / "params.pkl").read_bytes())
    loader.load_state_dict(json.loads((folder / "loader.json").read_text()))

for step in range(start + 1, n_steps + 1):
    arrays = [tensor.numpy().astype(np.int32) for tensor in next(loader)]
    batch = [jax.make_array_from_process_local_data(sharding, array) for array in arrays]
    params, loss = train_step(params, *batch)
    if rank == 0:
        print(f"step {step}: loss {loss.item():.5f}", flush=True)

    if step % save_every == 0:    # each process writes its state, and rank 0 merges them
        folder = checkpoints / f"{step}"
        write_atomic(folder / f"rank-{rank}.json", json.dumps(loader.state_dict()))
        if rank == 0:
            (folder / "params.pkl").write_bytes(pickle.dumps(jax.tree.map(np.asarray, params)))
        sync_global_devices("all have written")
        if rank == 0:
            files = [folder / f"rank-{number}.json" for number in range(world_size)]
            state = merge_states([json.loads(file.read_text()) for file in files])
            write_atomic(folder / "loader.json", json.dumps(state))
loader.close()
