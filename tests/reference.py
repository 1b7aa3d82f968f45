"""Independent references in float64 numpy: sampling by sorting, joint laws."""

import itertools

import numpy as np


def warp(logits, setting, prompt=(), output=()):
  """Turns logits `[V]` into a law the way the transformers library does.

  Args:
    logits: `[V]`.
    setting: dict of temperature, top_k, top_p, min_p, repetition_penalty,
      presence_penalty, frequency_penalty, bias (`[V]`, -inf bans); a missing
      one is off.
    prompt: token ids of the prompt.
    output: token ids of the output so far.
  """
  z = np.asarray(logits, np.float64).copy()
  V = len(z)
  get = lambda name, off: setting.get(name, off)
  for token in set(prompt) | set(output):
    penalty = get("repetition_penalty", 1.0)
    z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
  for token in set(output):
    z[token] -= get("frequency_penalty", 0.0) * list(output).count(token)
    z[token] -= get("presence_penalty", 0.0)
  z = z + np.asarray(get("bias", 0.0))
  temperature = get("temperature", 0.0)
  if temperature == 0:
    law = np.zeros(V)
    law[np.argmax(z)] = 1
    return law
  law = np.exp((z - z.max()) / temperature)
  law /= law.sum()
  order = np.argsort(-law, kind="stable")
  k = get("top_k", 0)
  if 0 < k < V:
    law = np.where(law >= law[order[k - 1]], law, 0)
    law /= law.sum()
  p = get("top_p", 1.0)
  if p < 1:
    before = np.cumsum(law[order]) - law[order]
    threshold = law[order[before < p - 1e-12]].min()
    law = np.where(law >= threshold, law, 0)
    law /= law.sum()
  floor = get("min_p", 0.0) * law.max()
  law = np.where(law >= floor, law, 0)
  return law / law.sum()


def joint_law(next_logits, vocab_size, prompt, setting, num_tokens):
  """Returns `[V ** n]`, the law of `n` tokens drawn one by one.

  Args:
    next_logits: `next_logits(tokens) -> [V]`, the model's after those tokens.
    vocab_size: `V`.
    prompt: token ids.
    setting: see `warp`.
    num_tokens: `n`.
  """
  law = np.zeros(vocab_size**num_tokens)

  def walk(output, weight):
    if len(output) == num_tokens:
      code = 0
      for token in output:
        code = code * vocab_size + token
      law[code] += weight
      return
    p = warp(next_logits([*prompt, *output]), setting, prompt, output)
    for token in np.flatnonzero(p > 0):
      walk([*output, int(token)], weight * p[token])

  walk([], 1.0)
  return law


def sequences(vocab_size, num_tokens):
  """Returns all `V ** n` token sequences in base-V order."""
  return list(itertools.product(range(vocab_size), repeat=num_tokens))
