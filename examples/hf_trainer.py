"""The Hugging Face Trainer with 8-bit gradients, and a tiny GPT-2 that learns to count.

    gossamer run -np 2 examples/hf_trainer.py

torchrun and `accelerate launch` start it too. One method wraps the model in Gossamer where the Trainer would wrap it in
torch DDP. Checkpoints, accumulation and mixed precision work as before.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gossamer as gs


class GossamerTrainer(Trainer):
    def _wrap_model(self, model, training=True, dataloader=None):
        if not training or isinstance(model, gs.DataParallel):
            return model
        wrapped = gs.DataParallel(model, self.optimizer, algorithm="bytegrad")
        return self.accelerator.prepare_model(wrapped, evaluation_mode=True)  # for mixed precision


tokens = torch.randint(0, 64, (64, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(16)
data = [{"input_ids": row % 64, "labels": row % 64} for row in tokens]
config = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    num_train_epochs=20,
    learning_rate=1e-2,
    use_cpu=not torch.cuda.is_available(),
    logging_steps=8,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = GossamerTrainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
trainer.train()
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history[:-1]:
        print(f"step {entry['step']}: loss {entry['loss']}")
trainer.model_wrapped.close()
