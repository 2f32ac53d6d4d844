"""The scheduling IR: a draft of the next step, passes that edit it, a verifier that checks it."""

from sagellm.kvmgr.scheduler_ir.batch import DecodeBatch
from sagellm.kvmgr.scheduler_ir.builder import IRBuilder
from sagellm.kvmgr.scheduler_ir.freeze import freeze
from sagellm.kvmgr.scheduler_ir.pipeline import BaseSchedulerIR, ScheduleRequest, ScheduleResult
from sagellm.kvmgr.scheduler_ir.verify import verify, verify_bound

__all__ = [
    "BaseSchedulerIR",
    "DecodeBatch",
    "IRBuilder",
    "ScheduleRequest",
    "ScheduleResult",
    "freeze",
    "verify",
    "verify_bound",
]
