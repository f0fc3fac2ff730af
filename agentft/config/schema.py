"""The run configuration (floor 1): one frozen dataclass per section of a YAML, one line of doc beside each field.

``agentft.config.load`` turns a YAML and ``key=value`` overrides into a ``RunConfig``; nothing else travels further.
``agentft.config.describe.field_docs()`` gives the lines of doc at run time (error messages use them).
Times are a number and a unit: ``24ep`` epochs, ``300ba`` batches (steps of the optimiser), ``1dur`` the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING

from agentft.config.algorithms import AlgorithmsConfig, CurriculumConfig
from agentft.config.checkpoints import CheckpointsConfig
from agentft.config.distributed import DistributedConfig
from agentft.config.forgetting import ForgettingConfig
from agentft.config.mixing import MixConfig
from agentft.config.objectives import ObjectivesConfig


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How a session becomes tokens."""

    template: Literal["etai", "chat", "chatml", "functioncall"] = "etai"  # native; the tokenizer's own; two as text
    handles: bool = True  # point at shown files and lines (<F1><L07>) instead of copying them
    max_tokens: int = 1024  # longest sequence; results shrink first, then the oldest steps go
    result_tokens: int = 160  # longest result, cut in the middle
    show_thoughts: bool = True  # render and train the agent's thoughts
    list_tools: bool = False  # chat templates: list the run's tools before a session (a chat lists its own)


@dataclass(frozen=True, kw_only=True)
class FeedbackPositionsConfig:
    """Own positions for result tokens."""

    enabled: bool = False  # off: positions of the plain model
    start: int = 10000  # first position of the reserved range
    rotary_base: float = 10000.0  # rotary frequency base inside the range


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: the backbone's own weights are frozen, and small matrices beside them are trained."""

    rank: int = 16  # width of the adapters
    alpha: float = 32.0  # what an adapter adds is multiplied by alpha / rank
    dropout: float = 0.0  # share of an adapter's inputs that is dropped
    targets: list[str] = field(default_factory=list)  # linear layers with an adapter; []: those of the architecture
    train_embeddings: bool = True  # train the rows of special tokens that the checkpoint has never seen
    frozen: Literal["fp32", "bf16"] = "fp32"  # precision in which the frozen weights are kept


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The backbone and where it comes from."""

    preset: Literal["tiny-glm", "tiny-kimi"] | None = None  # random initialisation, for CPU
    path: str | None = None  # folder or hub name of a Hugging Face causal LM; either this or preset
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa"  # attention implementation of the backbone
    lora: LoraConfig | None = None  # train adapters instead of all weights; null trains all
    quantize: Literal["none", "nf4"] = "none"  # 4-bit frozen weights under adapters (QLoRA); needs a GPU
    feedback_positions: FeedbackPositionsConfig = field(
        default_factory=FeedbackPositionsConfig
    )  # own positions for result tokens


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the shards are and how they are read."""

    shards: str = MISSING  # local folder that holds train/ val/ test/ and meta.json
    remote: str | None = None  # s3://bucket/prefix to stream from; shards is then the local copy
    train_split: Literal["train", "val", "test"] = "train"  # split that is trained on
    eval_split: Literal["train", "val", "test"] = "test"  # split that is evaluated and probed on
    calibration_split: Literal["val", "test"] | None = None  # split that the outcome head is calibrated on at the end
    batch_size: int = 16  # sessions in a global batch
    packing: Literal["none", "buckets", "pack"] = "pack"  # pack: no padding; buckets: sorted by length; none: as drawn
    pack_tokens: int | None = None  # most tokens in one forward pass (packing: pack); null: text.max_tokens
    microbatch_size: int = 8  # most sessions in one forward pass (packing: buckets, none)
    mix: MixConfig | None = None  # what every global batch is made of; null: what the order gives
    input_noise: float = 0.0  # share of the input tokens replaced by random ones while training; labels stay
    num_canonical_nodes: int = 1  # fixes the sample order whatever the number of ranks
    num_workers: int = 0  # loader processes a rank
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)  # order of the sessions within an epoch


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """A weight over time. ``kind`` decides which of the other fields count."""

    kind: Literal["constant", "step", "linear", "cosine", "piecewise"] = "constant"  # shape over time
    start: float = MISSING  # value at time 0
    end: float | None = None  # value from `until` on (linear, cosine)
    until: str | None = None  # time at which `end` is reached, such as 10ep or 200ba
    slope: float | None = None  # linear without an end: change per unit of `per`
    per: Literal["ep", "ba"] = "ep"  # unit of time for slope
    floor: float | None = None  # never below this value
    points: list[str] = field(default_factory=list)  # step/piecewise: "5ep=0.15" entries in time order


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weight of each component; defaults are the project's (code decays, reward rises)."""

    code: ScheduleConfig = field(  # cross-entropy of the tokens that the agent writes
        default_factory=lambda: ScheduleConfig(kind="linear", start=0.8, slope=-0.02, per="ep", floor=0.4)
    )
    intent: ScheduleConfig = field(  # binary cross-entropy of the intents
        default_factory=lambda: ScheduleConfig(kind="step", start=0.25, points=["5ep=0.15"])
    )
    tool: ScheduleConfig = field(  # cross-entropy of the tool at each call
        default_factory=lambda: ScheduleConfig(start=0.20)
    )
    cursor: ScheduleConfig = field(  # Huber loss of the place of the repair
        default_factory=lambda: ScheduleConfig(kind="step", start=0.15, points=["3ep=0.10"])
    )
    reward: ScheduleConfig = field(  # squared error of the predicted outcome
        default_factory=lambda: ScheduleConfig(kind="step", start=0.20, points=["10ep=0.25"])
    )
    policy: ScheduleConfig = field(  # policy gradient on exactly the tokens of executed calls
        default_factory=lambda: ScheduleConfig(start=0.05)
    )
    distill: ScheduleConfig = field(  # KL of failed calls from what the model would write knowing the error
        default_factory=lambda: ScheduleConfig(start=0.0)
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """DecoupledAdamW with one group per part of the model; learning rates per group."""

    backbone_lr: float = 5e-5  # peak learning rate of the backbone
    intent_lr: float = 1e-4  # peak learning rate of the intent head
    tool_lr: float = 5e-5  # peak learning rate of the tool head
    reward_lr: float = 2e-5  # peak learning rate of the reward head
    cursor_lr: float = 3e-5  # peak learning rate of the cursor head
    betas: tuple[float, float] = (0.9, 0.999)  # decay of the first and second moment
    weight_decay: float = 0.01  # as in AdamW: times the learning rate, per step
    warmup: str = "0ba"  # linear warm-up from 0
    decay: Literal["none", "cosine", "linear", "step"] = "cosine"  # shape after warm-up
    final_lr: float = 0.1  # share of the learning rate left at the end (cosine, linear)
    decay_per_epoch: float = 0.95  # factor after each epoch (step)
    clip_norm: float = 1.0  # gradient norm limit; 0 switches clipping off


@dataclass(frozen=True, kw_only=True)
class RecordedConfig:
    """Recorded calls of coming batches, executed ahead of time."""

    share: float = 1.0  # share of sessions (by stable hash) whose calls are executed while training
    prefetch_batches: int = 4  # batches ahead


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Calls sampled from the current model on training sessions; they receive the policy gradient."""

    every: int = 0  # batches between rounds; 0 switches them off
    calls: int = 8  # calls a round
    temperature: float = 1.0  # of sampling


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Calls sampled from the current model on held-out sessions: executed and logged, never trained on."""

    every: int = 200  # batches between rounds; 0 switches the probe off
    calls: int = 16  # calls a round
    temperature: float = 1.0  # of sampling


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Feedback distillation of failed calls; its weight over time is ``loss.distill`` (0: nothing is run for it)."""

    temperature: float = 1.0  # both distributions are softened by it
    max_calls: int = 8  # failed calls of a global batch, at most


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Shaped reward of one execution."""

    passed: float = 1.0  # reward of a call that ended well
    failed: float = -0.5  # reward of a call that failed, timed out or did not parse
    entropy_bonus: float = 0.01  # weight of the entropy of the call's tokens


@dataclass(frozen=True, kw_only=True)
class FeedbackConfig:
    """Execution feedback: what is run while training, where, and what it is worth."""

    backend: Literal["docker", "local", "replay", "off"] = "docker"  # engine; replay reads results from a trace
    replay_from: str | None = None  # run folder or trace file whose executions are repeated (backend: replay)
    recorded: RecordedConfig = field(default_factory=RecordedConfig)  # calls of the training sessions, ahead of time
    policy: PolicyConfig = field(default_factory=PolicyConfig)  # calls sampled on training sessions
    probe: ProbeConfig = field(default_factory=ProbeConfig)  # calls sampled on held-out sessions
    reward: RewardConfig = field(default_factory=RewardConfig)  # shaped reward of one execution
    distillation: DistillationConfig = field(default_factory=DistillationConfig)  # failed calls, with the error as hint
    grammar: bool = True  # calls are sampled within the grammar of a call; false shows how many the model writes well
    max_infra_share: float = 0.2  # share of lost executions (of at least 20) beyond which the run stops
    wait_s: float = 120.0  # longest wait for one execution before it counts as lost


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Results of deterministic calls that are not computed again. Whether they come from here changes no loss."""

    folder: str | None = None  # folder on a local disk; several runs may share one; null keeps them with the run
    mib: int = 512  # size on disk, oldest use dropped first; 0 keeps results in memory only
    verify_share: float = 0.01  # share of the hits that are run again in the background; a difference ends the reuse


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """The sandbox that feedback uses. Sizes in MiB, times in seconds."""

    image: str = "python"  # image name as built by `agentft sandbox build`
    hosts: list[str] = field(default_factory=list)  # unix:///path, tcp://name:port, ray://auto; empty: DOCKER_HOST
    tls: str | None = None  # folder with ca.pem, cert.pem and key.pem for tcp hosts
    runtime: str | None = None  # container runtime of the engine, such as runsc; null takes the engine's own
    workers: int = 2  # containers kept warm, on each host
    reuse: Literal["session", "never"] = "session"  # a container serves sessions in turn, wiped in between; or only one
    timeout_s: float = 20.0  # wall-clock limit of one call
    memory_mib: int = 512  # memory limit of one container
    pids: int = 128  # processes and threads of one container
    cpus: float = 1.0  # cores of one container
    cache: CacheConfig = field(default_factory=CacheConfig)  # results that are not computed again


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, on what, and how exactly."""

    duration: str = MISSING  # such as 24ep or 300ba
    device: Literal["cpu", "gpu", "auto"] = "auto"  # auto takes a GPU where there is one
    precision: Literal["fp32", "amp_bf16"] = "fp32"  # amp_bf16: bfloat16 autocast
    vocab_chunk_tokens: int = 256  # trained tokens whose logits exist at a time; 0 keeps all; on a GPU rather 2048
    activation_checkpointing: bool = False  # compute activations again in backward: less memory, a third more time
    eval_interval: str = "1ep"  # time between evaluations of the losses on eval_split; 0ba switches them off
    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)  # when it is saved and what is kept
    distributed: DistributedConfig = field(default_factory=DistributedConfig)  # how processes share the model
    threads: int = 0  # torch threads a process; 0 takes OMP_NUM_THREADS, else an equal share of the cores


@dataclass(frozen=True, kw_only=True)
class LoggersConfig:
    """Where numbers go."""

    console: bool = True  # progress bar with rate and time left
    tensorboard: bool = True  # runs/<name>/tensorboard
    file: bool = True  # runs/<name>/train.log and metrics.jsonl


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run is."""

    run_name: str = MISSING  # folder under runs_dir
    stage: Literal["agent", "pretrain", "sft"] = "agent"  # all four heads; the language model on a corpus; on chats
    runs_dir: str = "runs"  # folder of all runs
    overwrite: bool = False  # remove an earlier run of this name first; without it such a run is refused
    seed: int = 17  # of initialisation, order and sampling
    objectives: ObjectivesConfig | None = None  # stage pretrain: what is predicted; null elsewhere
    tools: list[str] = field(default_factory=list)  # YAML files of tools of your own, beside the 18 built-in ones
    text: TextConfig = field(default_factory=TextConfig)  # how a session becomes tokens
    model: ModelConfig = field(default_factory=ModelConfig)  # the backbone
    data: DataConfig = field(default_factory=DataConfig)  # shards and batches
    loss: LossConfig = field(default_factory=LossConfig)  # weights of the components over time
    forgetting: ForgettingConfig = field(default_factory=ForgettingConfig)  # what keeps earlier stages alive
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # learning rates and their schedule
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)  # what is executed while training
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)  # where it is executed
    algorithms: AlgorithmsConfig = field(default_factory=AlgorithmsConfig)  # what bends training, watches or ends it
    train: TrainConfig = field(default_factory=TrainConfig)  # how long and on what
    loggers: LoggersConfig = field(default_factory=LoggersConfig)  # where numbers go
