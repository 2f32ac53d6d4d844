"""Scheduling: passes edit a draft of the next step. Plans as graphs and as text."""

from sagellm.kvmgr.scheduler_ir.batch import DecodeBatch
from sagellm.kvmgr.scheduler_ir.diff import diff, diff_text
from sagellm.kvmgr.scheduler_ir.freeze import freeze
from sagellm.kvmgr.scheduler_ir.graph import IRGraph
from sagellm.kvmgr.scheduler_ir.pipeline import PassPipeline
from sagellm.kvmgr.scheduler_ir.rows import Rows
from sagellm.kvmgr.scheduler_ir.text import parse_graph, parse_plan, print_graph, print_plan
from sagellm.kvmgr.scheduler_ir.verify import verify, verify_bound, verify_proposals
from sagellm.kvmgr.scheduler_ir.verify_graph import verify_graph

__all__ = [
    "DecodeBatch",
    "IRGraph",
    "PassPipeline",
    "Rows",
    "diff",
    "diff_text",
    "freeze",
    "parse_graph",
    "parse_plan",
    "print_graph",
    "print_plan",
    "verify",
    "verify_bound",
    "verify_graph",
    "verify_proposals",
]
