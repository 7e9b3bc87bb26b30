"""Kinds of events, and the names of values that `prl-report`, the progress line and the benchmarks read.

Writers may write any other slash-grouped name; it lands in TensorBoard and is otherwise left alone.

kind        written by                     step  values                     labels
step        orchestrator, once a step      k     train/*, data/*, weights/*
weights     orchestrator, once a commit    v     weights/*
evaluation  orchestrator, once a version   v     eval/*                     domain
checkpoint  orchestrator                   k     checkpoint/*, streams/*
save_failed orchestrator                   k     checkpoint/*               error: why there is no checkpoint of the step
samplers    orchestrator, at each change   -     samplers/*                 event: what happened to whom
phase       orchestrator (and prl-submit)  -     -                          name: what begins at the event's time
model       node agent, once an attempt    -     model/*                    obstacle: why it copied nothing, or empty
usage       orchestrator or node agent     -     usage/*, cumulative        role, process: whom it speaks of
engine      sampler, every report_s        -     engine/*
scalars     anyone, at any time            any   anything

train/ (the trainer)
    loss                       of the whole step: sum of weight * loss over its denominator, all parts together
    loss_<part>                its parts: policy, kl, entropy, ratio_penalty, value, with their coefficients
    grad_norm                  before clipping
    skipped                    1 where the gradient was not finite, so that the weights stayed as they were, else 0
    entropy                    mean over trained tokens, in nats
    ess                        effective sample size of the raw importance ratios, as a share of the samples: 0 to 1
    ratio_mean, ratio_max      of the raw importance ratios, trainer to sampler
    clip_fraction              trained tokens that a bound of the loss limits: 0 to 1
    mask_fraction              trained tokens that a ratio mask keeps out: 0 to 1
    mismatch_mean_nats, mismatch_max_nats, mismatch_k3_nats
                               trainer's log-probs less the sampler's: mean of the distance, the worst token's, k3 estimate
    kl                         k3 estimate of the divergence from the reference, mean over trained tokens, in nats
    value_mean                 of the value head, over trained tokens
    explained_variance         of the returns by the values: 1 - variance of what is left / variance of the returns; at most 1
    kl_coefficient, entropy_coefficient
                               in this step, where they change
    lag_mean, lag_max          over trained tokens, in optimizer steps
    lag_<n>                    trained tokens of lag n (optional; makes the report's histogram)
    tokens                     trained tokens, all ranks
    step_s                     from one step's end to the next one's; this and all of it by the clock of the first rank
    wait_s                     of it: waiting for a step file
    send_s                     of it: the trainer's stall for a version: offering, gathering and sending (or writing) weights;
                               with weights.overlap what it waited for of that before its optimizer changed weights
    save_s                     of it: what checkpoints took of the trainer's time
    data_s                     of it: reading the step file
    reference_s, proximal_s    of it: log-probs of the reference; those of the policy of the step before, and its copy
    forward_backward_s, optimizer_s  of it: both passes, with the wait for other ranks' gradients; the optimizer
    all_tokens, padding        tokens of the step, prompts included; padding as a share of the tokens computed: 0 to 1
    mfu                        model FLOP utilisation of both passes and the optimizer, nothing computed twice counted: 0 to 1
    learning_rate              of this step
    peak_memory_bytes          of the accelerator, on the fullest rank, in this step; without one, resident memory so far
data/ (the preprocessor)
    reward_mean, reward_std    of the step's groups, rollouts that are left out included
    groups_all_equal           groups whose rewards are all equal: 0 to 1
    rollouts                   trained rollouts
    output_tokens_mean         tokens of an answer
    cut_share                  rollouts that ended at the token limit: 0 to 1
    mixed_version_share        rollouts sampled by more than one version: 0 to 1
    lag_mean, lag_max          over trained tokens, in optimizer steps
    too_old_tokens             over the lag limit, masked or trained (preprocess.too_old)
    pack_waste                 of the micro-batches' room: 0 to 1
    rank_tokens_max_over_mean  tokens of the fullest trainer rank to the mean of all
    ready_s                    from the announcement of the step's last rollouts, which are durable then, to its file being
                               durable; where the trainer was more than a step behind until later, from then
    heard_s, read_s, build_s, publish_s
                               of it: until the announcement was heard here, reading what it speaks of, building the step, the
                               filesystem's own time
    held_back_s                before that: waiting for the trainer
    dropped_<why>              rollouts since the step before: too_old, abandoned, all_equal, cut, overlong, empty
    quarantined_files          rollout files that could not be read, so far
weights/ (orchestrator and samplers), of a version that samplers serve; the trainer's stall for it is train/send_s
    transfer_s                 on its way: sent (send_s), or written and read (send_s and the longest receive_s)
    pause_s                    longest time for which a sampler stood still for this version, from the end of the engine's step
                               that was under way
    gap_s                      longest time between two tokens of one sequence around the update
    receive_s                  longest time from the armed receiver, or from the order to read, to the verified version
    send_s, commit_s, update_s the trainer's sending or writing; pause and copy at all samplers; from the offer to the end
    bytes                      bytes sent, to all samplers at once, or written
    gathered_bytes             bytes of whole tensors that one trainer rank put together to send or write them: 0 by lanes, all
                               of the version where those fall back on files
    changed_share              values that are others than in the version sent before: 0 to 1; where only those were sent
                               (weights.delta)
    by_files                   1 where it went through files, else 0
    direct_share               of the bytes, those that were written where they lie, past vLLM's loader: 0 to 1; the smallest
                               of all samplers
    passed_over                versions before it that were never sent, since an update outlasted a step
samplers/ (the orchestrator)
    serving                    replicas that may be asked
    restarts                   processes that were started again, so far
    seeded                     replicas that came (back) and got their weights from another one, so far
    epoch                      groups for the weights that were needed so far
    fenced_<why>               replicas that stopped serving, so far: died, failed, silent, unreachable, late, refused, mismatch
engine/ (samplers), as vLLM counts
    running, waiting           requests that are being sampled; that wait for their turn or for room in the KV cache
    kv_cache_share             of the KV cache, in use: 0 to 1
    prefix_hit_share           of the prompts' tokens that were looked up since the line before, found in the KV cache: 0 to 1
    preemptions                requests that had to give up their KV cache, since the process began; these, too:
    prompt_tokens, generated_tokens
processes/ (the orchestrator)
    restarts                   actors, verifiers and preprocessors that were started again, so far
checkpoint/ (the orchestrator)
    bytes, write_s             of its files; from the end of its step to the files durable
    failures, retired          saves of this attempt that failed; old checkpoints that it deleted, both so far
streams/ (the orchestrator)
    reclaimed_files, reclaimed_bytes, reclaim_failures  files deleted behind checkpoints of this attempt, so far
eval/ (actors)
    reward_mean, reward_std    over the held-out problems of one domain
    problems                   how many
    output_tokens              tokens of an answer, mean
model/ (node agents under Slurm)
    copied_bytes, copy_s       of the model, to the node's own disk (0 where it was not copied); from the order to its end
usage/ (node agents)
    cpu_s                      processor seconds since its start, of the process and all below it
    max_rss_bytes              largest resident memory (so far), of the process and all below it
"""

STEP = "step"
WEIGHTS = "weights"
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
SAVE_FAILED = "save_failed"
SAMPLERS = "samplers"
PROCESSES = "processes"
PHASE = "phase"
MODEL = "model"
USAGE = "usage"
ENGINE = "engine"

LOSS = "train/loss"
LOSS_PART_PREFIX = "train/loss_"  # and the name of a part
GRAD_NORM = "train/grad_norm"
SKIPPED = "train/skipped"
ENTROPY = "train/entropy"
ESS = "train/ess"
LAG_MEAN = "train/lag_mean"
LAG_MAX = "train/lag_max"
LAG_COUNT_PREFIX = "train/lag_"  # and a number
TOKENS = "train/tokens"
STEP_S = "train/step_s"
WAIT_S = "train/wait_s"
SEND_S = "train/send_s"
SAVE_S = "train/save_s"
DATA_S = "train/data_s"
REFERENCE_S = "train/reference_s"
PROXIMAL_S = "train/proximal_s"
FORWARD_BACKWARD_S = "train/forward_backward_s"
OPTIMIZER_S = "train/optimizer_s"
ALL_TOKENS = "train/all_tokens"
PADDING = "train/padding"
MFU = "train/mfu"
LEARNING_RATE = "train/learning_rate"
PEAK_MEMORY_BYTES = "train/peak_memory_bytes"

REWARD_MEAN = "data/reward_mean"
ROLLOUTS = "data/rollouts"
OUTPUT_TOKENS_MEAN = "data/output_tokens_mean"
CUT_SHARE = "data/cut_share"
MIXED_VERSION_SHARE = "data/mixed_version_share"
READY_S = "data/ready_s"
PUBLISH_S = "data/publish_s"

TRANSFER_S = "weights/transfer_s"
PAUSE_S = "weights/pause_s"
RECEIVE_S = "weights/receive_s"
GAP_S = "weights/gap_s"
SENT_BYTES = "weights/bytes"
CHANGED_SHARE = "weights/changed_share"
PASSED_OVER = "weights/passed_over"

SERVING = "samplers/serving"
RESTARTS = "samplers/restarts"
SEEDED = "samplers/seeded"
EPOCH = "samplers/epoch"
FENCED_PREFIX = "samplers/fenced_"  # and a reason

ENGINE_RUNNING = "engine/running"
ENGINE_WAITING = "engine/waiting"
KV_CACHE_SHARE = "engine/kv_cache_share"
PREFIX_HIT_SHARE = "engine/prefix_hit_share"
PREEMPTIONS = "engine/preemptions"
PROMPT_TOKENS = "engine/prompt_tokens"
GENERATED_TOKENS = "engine/generated_tokens"

PROCESS_RESTARTS = "processes/restarts"

EVAL_REWARD_MEAN = "eval/reward_mean"
EVAL_PROBLEMS = "eval/problems"

CHECKPOINT_BYTES = "checkpoint/bytes"
CHECKPOINT_WRITE_S = "checkpoint/write_s"
CHECKPOINT_FAILURES = "checkpoint/failures"
CHECKPOINTS_RETIRED = "checkpoint/retired"

MODEL_COPIED_BYTES = "model/copied_bytes"
MODEL_COPY_S = "model/copy_s"

CPU_S = "usage/cpu_s"
MAX_RSS_BYTES = "usage/max_rss_bytes"

# Phases that benchmarks measure from; any others may be written too and show up in the report.
COMMAND = "command"  # prl-submit's own start (the creation time of its process)
FIRST_ROLLOUT_REQUEST = "first rollout request"
RUNNING = "running"  # the first version is everywhere: rollouts are handed out
