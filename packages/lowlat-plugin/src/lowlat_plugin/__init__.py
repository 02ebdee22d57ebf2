"""The contract between low-latency kernel libraries and the engines that host them.

Kernel authors need `KernelSpec` and `Kernel`; engines need `Host`, `discover` and `LowLatency`. See `docs/plugins.md`.
"""

from lowlat_plugin.agreement import Agreement, Alone, ThreadRanks
from lowlat_plugin.facts import EngineFacts, deadline_for
from lowlat_plugin.host import Host
from lowlat_plugin.install import LowLatency, Policy, State
from lowlat_plugin.kernel import BuildContext, Kernel, Plan, WeightSource, Workspace, decode_shapes, verify_shapes
from lowlat_plugin.reasons import Code, DeadlineExceeded, Reason, Refused, StepFailed
from lowlat_plugin.registry import Candidate, Registry, discover
from lowlat_plugin.report import Report
from lowlat_plugin.routing import Counters, Path, Route, RoutingTable
from lowlat_plugin.spec import (
    Bound,
    Condition,
    Coverage,
    DeviceLimits,
    KernelSpec,
    Metric,
    Mode,
    Numerics,
    Requirements,
)
from lowlat_plugin.steps import (
    Binding,
    Communicator,
    KVLayout,
    LayerKV,
    Part,
    Selection,
    Shape,
    StepInputs,
    StepOutputs,
)
from lowlat_plugin.version import CONTRACT_VERSION, FEATURES, VersionRange

__all__ = [
    "CONTRACT_VERSION",
    "FEATURES",
    "Agreement",
    "Alone",
    "Binding",
    "Bound",
    "BuildContext",
    "Candidate",
    "Code",
    "Communicator",
    "Condition",
    "Counters",
    "Coverage",
    "DeadlineExceeded",
    "DeviceLimits",
    "EngineFacts",
    "Host",
    "KVLayout",
    "Kernel",
    "KernelSpec",
    "LayerKV",
    "LowLatency",
    "Metric",
    "Mode",
    "Numerics",
    "Part",
    "Path",
    "Plan",
    "Policy",
    "Reason",
    "Refused",
    "Registry",
    "Report",
    "Requirements",
    "Route",
    "RoutingTable",
    "Selection",
    "Shape",
    "State",
    "StepFailed",
    "StepInputs",
    "StepOutputs",
    "ThreadRanks",
    "VersionRange",
    "WeightSource",
    "Workspace",
    "deadline_for",
    "decode_shapes",
    "discover",
    "verify_shapes",
]
