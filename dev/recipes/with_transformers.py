"""
Train with the Trainer of transformers, in one process or in several:

    python dev/recipes/with_transformers.py my_shards
    torchrun --standalone --nproc_per_node=2 dev/recipes/with_transformers.py my_shards

Stop it at any time, even during a save. The same command resumes, on any number of ranks.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader, gather_states
from dataset import find_data, write_atomic
from tokenizer import find_tokenizer

rows_per_step, T = 8, 128    # of all ranks together
n_steps, save_every = 40, 10
checkpoints = Path("with_transformers")

class PackedTrainer(Trainer):
    def get_train_dataloader(self):
        for inputs, targets in loader:
            # Models of transformers would shift `labels` once more, so pass `shift_labels` as well
            yield {"input_ids": inputs, "labels": targets, "shift_labels": targets}

    def _save_checkpoint(self, *arguments):
        super()._save_checkpoint(*arguments)
        loader_state = gather_states(loader)    # all ranks call this, and rank 0 gets the state
        if loader_state:
            folder = checkpoints / f"checkpoint-{self.state.global_step}"
            write_atomic(folder / "loader.json", json.dumps(loader_state))

    def log(self, logs, *arguments):
        super().log(logs, *arguments)
        if "loss" in logs and self.is_world_process_zero():
            print(f"step {self.state.global_step}: loss {logs['loss']:.5f}", flush=True)

# Create the loader after TrainingArguments, which set up the ranks
world_size = int(os.environ.get("WORLD_SIZE", 1))
arguments = TrainingArguments(
    checkpoints, max_steps=n_steps, save_steps=save_every, logging_steps=1, learning_rate=0.001,
    weight_decay=0.01, lr_scheduler_type="constant", report_to=[], disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),    # or several ranks on CPUs would train apart
    average_tokens_across_devices=True,    # divides the loss by the targets of all ranks
    save_total_limit=2,       # or more: Trainer deletes old folders before the new one is complete
    ignore_data_skip=True)    # the loader resumes by itself
data = find_data(*sys.argv[1:])
tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)
loader = PackedLoader(tokenizer, rows_per_step // world_size, T, "train", data_dir=data)

set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=1,
    num_attention_heads=2, max_position_embeddings=T))

# Resume from the newest folder with a loader.json, which is written last
start = max((int(path.parent.name.split("-")[1]) for path in checkpoints.glob("*/loader.json")), default=0)
folder = checkpoints / f"checkpoint-{start}"
if start:
    loader.load_state_dict(json.loads((folder / "loader.json").read_text()))
PackedTrainer(model, arguments).train(resume_from_checkpoint=str(folder) if start else None)
loader.close()
