"""The section ``policy`` of a configuration: the options of each kind of policy."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from apexrl.core.errors import ConfigError
from apexrl.core.plugins import Registry
from apexrl.core.validation import Integer, NonNegative, NonNegativeInteger, Number, Positive, options
from apexrl.policies.networks.mlp import DistributionName
from apexrl.policies.vla.policy import Freezable

MAX_WIDTH, MAX_VLA_SIZE = 2**20, 2**14
"""Beyond what any machine holds: a typing mistake, better refused than tried."""
Width = Annotated[Integer, Field(ge=1, le=MAX_WIDTH)]
Widths = tuple[Width, ...]
ModelSize = Annotated[Integer, Field(ge=1, le=MAX_VLA_SIZE)]
Groups = Annotated[tuple[str, ...], Field(min_length=1)]


@options("policy")
class PolicyConfig:
    """The networks."""

    kind: str = "mlp"
    """mlp: separate actor and critic (images get convolutions); gru: with memory; roa: teacher and student; or an
    actor network or a policy of your own: a registered name or module:Class."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of an actor network or a policy of your own."""
    hidden_dims: Widths = (64, 64)
    """Widths of the hidden layers; of those before the memory for gru. Larger represent more but are slower and may
    need a smaller learning rate; usually [64, 64] to [512, 256, 128]."""
    critic_hidden_dims: Widths | None = None
    """Widths of the critic's hidden layers; null for the actor's. For gru only with critic_groups."""
    rnn_hidden_dim: Width = 64
    """Width of the memory; only for gru."""
    activation: Literal["tanh", "relu", "elu", "silu", "gelu"] = "tanh"
    """Between the layers."""
    actor_groups: Groups | None = None
    """Observation groups that the actor sees; null for all but the privileged ones (priv, privileged, critic)."""
    critic_groups: Groups | None = None
    """Observation groups that the critic sees; null for all. For gru those beside the memory, null for none."""
    distribution: DistributionName = "auto"
    """auto, gaussian, squashed_gaussian (bounded by tanh) or categorical."""
    init_std: Positive = 1.0
    """Standard deviation at the start. Larger explores more, smaller starts closer to the mean action; usually 0.3
    to 1."""
    min_std: Positive = 1e-3
    """Lower bound of the standard deviation."""
    max_std: Positive = 10.0
    """Upper bound of the standard deviation."""
    state_dependent_std: bool = False
    """Let the standard deviation depend on the observation."""
    gsde: bool = False
    """Explore by a random function of the actor's last features (gSDE, Raffin et al. 2021) instead of noise at every
    step; init_std, min_std and max_std are then of its weights, init_std usually 0.05 to 0.4. For mlp and gru."""
    gsde_interval: NonNegativeInteger = 4
    """Steps after which gSDE samples another function, usually 4 to 64; 0 samples one per episode."""
    normalize_obs: bool = False
    """Normalise observations by running statistics: usually true where their units differ, such as in MuJoCo; false
    where they are scaled already."""
    history: Width = 24
    """Frames that the task stacks in its observation group policy; only for roa."""
    history_kind: Literal["mlp", "conv", "gru"] = "mlp"
    """How the adaptation module reads them; only for roa."""
    latent_dim: Width = 8
    """Width of the privileged feature; only for roa."""
    encoder_dims: Widths = (64,)
    """Widths of the hidden layers of the privileged encoder; only for roa."""
    adapt_dims: Widths = (128, 64)
    """Widths of the hidden layers of the adaptation module; only for roa."""

    @property
    def own_class(self) -> type[nn.Module] | None:
        """The policy or actor network of a user."""
        return None if self.kind in POLICY_KINDS else POLICIES.find(self.kind)

    @property
    def layers(self) -> dict[str, Any]:
        """The layers of the actor, as every network takes them."""
        return {"hidden_dims": self.hidden_dims, "activation": self.activation}

    @property
    def head(self) -> dict[str, Any]:
        """The options of ``ActionHead``."""
        names = ("distribution", "init_std", "min_std", "max_std", "state_dependent_std", "gsde", "gsde_interval")
        return {name: getattr(self, name) for name in names}

    @property
    def critic(self) -> dict[str, Any]:
        """The options of a critic."""
        widths = self.hidden_dims if self.critic_hidden_dims is None else self.critic_hidden_dims
        return {"hidden_dims": widths, "activation": self.activation, "groups": self.critic_groups}

    def __post_init__(self) -> None:
        if not self.min_std <= self.init_std <= self.max_std:
            raise ConfigError(
                f"policy.init_std must lie between policy.min_std ({self.min_std}) and policy.max_std "
                f"({self.max_std}), got {self.init_std}."
            )
        if self.gsde and self.kind == "roa":
            raise ConfigError("policy.gsde needs policy.kind mlp or gru, got roa.")
        if self.kind == "gru" and self.critic_hidden_dims is not None and self.critic_groups is None:
            raise ConfigError(
                f"policy.critic_hidden_dims {list(self.critic_hidden_dims)} has no effect on a gru without "
                "policy.critic_groups: its critic is a linear function of the memory. Name critic_groups."
            )


@options("policy")
class VLAConfig:
    """A vision-language-action model, for rloo, bc and ppo, which adds a value head; chosen by ``policy.kind`` vla."""

    kind: Literal["vla"] = "vla"
    """vla: camera images, state and instruction in, a chunk of actions out."""
    size: Literal["tiny", "small", "base", "large"] = "tiny"
    """About 1, 15, 100 or 300 million parameters."""
    width: ModelSize | None = None
    """Of the prefix's transformer; null for that of the size."""
    depth: ModelSize | None = None
    """Layers; null for those of the size."""
    num_heads: ModelSize | None = None
    """Attention heads; null for those of the size."""
    head: Literal["likelihood", "flow"] = "likelihood"
    """likelihood: a distribution over chunks; flow: chunks are denoised by flow matching."""
    distribution: Literal["gaussian", "laplace"] = "gaussian"
    """Of chunks; only for likelihood."""
    init_std: Annotated[Number, Field(ge=0.01, le=2)] = 0.6
    """Scale of that distribution at the start, on normalised actions; only for likelihood."""
    learn_std: bool = True
    """Learn that scale, for each dimension of an action; only for likelihood."""
    denoising_steps: ModelSize = 5
    """Only for flow."""
    noise: Literal["every_step", "last_step"] = "every_step"
    """Where sampling adds noise, so that chunks have likelihoods; only for flow. What last_step explores is what
    the likelihood is of: better for reinforcement learning from a few demonstrations, with few denoising_steps."""
    noise_level: Positive = 0.5
    """ModelSize of that noise; with last_step its standard deviation, on normalised actions; only for flow."""
    guidance: NonNegative = 1.0
    """Classifier-free guidance at inference; 1 is the conditional field alone; only for flow."""
    lora_rank: Annotated[Integer, Field(ge=0, le=MAX_VLA_SIZE)] = 0
    """Train low-rank additions of this rank instead of the weights; 0 trains the weights."""
    freeze: tuple[Freezable, ...] = ()
    """Parts that are not trained: any of vision, text, state, prefix, expert."""


POLICIES: Registry[type[nn.Module]] = Registry(
    "policy.kind",
    "apexrl.policies",
    lambda value: "" if isinstance(value, type) and issubclass(value, nn.Module) else "must be a Policy or nn.Module",
)
"""``policy.kind`` of users -> a ``Policy``, or an actor network for the policy of kind mlp."""


def register_policy(name: str, cls: type[nn.Module]) -> None:
    """Let configurations use a ``Policy``, or the class of an actor network, as ``policy.kind``."""
    POLICIES.register(name, cls)


POLICY_KINDS: dict[str, type[PolicyConfig | VLAConfig]] = {
    **dict.fromkeys(("mlp", "gru", "roa"), PolicyConfig),
    "vla": VLAConfig,
}
"""``policy.kind`` -> class of the section; the algorithm says which of its policies that is."""
