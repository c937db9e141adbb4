"""A training loop in ten lines: one logit per token, trained on the run of `generator.py`.

    python examples/trainer.py

It ends with the run, and prints the probability of the rewarded token.
"""

import torch

import turnstream

logits = torch.zeros(10, requires_grad=True)
with turnstream.connect().run("demo").batches() as batches:
    for step in batches:
        for mini_batch in step:
            batch = mini_batch.to_torch()
            sampled_BR = batch.input_ids_BT[:, -batch.loss_mask_BR.shape[1] :]
            gain = (logits.log_softmax(0)[sampled_BR] * batch.advantages_BR).sum()
            (gradient,) = torch.autograd.grad(gain, logits)
            logits.data += 5.0 * gradient / mini_batch.denominators.num_tokens
        step.done()
        step.commit()
print(f"probability of token 7: {logits.softmax(0)[7]:.3f}")
