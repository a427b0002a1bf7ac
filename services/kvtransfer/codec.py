"""Protobuf messages to this room's dataclasses and back."""

from __future__ import annotations

from dataclasses import asdict

from services.kvtransfer.directory import Change, Member
from services.kvtransfer.feed import HandoffState, Progress
from services.kvtransfer.layout import KVLayout
from services.kvtransfer.messages import FirstToken, ReadyBlock
from services.kvtransfer.transport import Endpoint, PeerRef
from services.wire.pb import block_transfer_pb2 as transfer_pb
from services.wire.pb import common_pb2, directory_pb2

_FINISH = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "cancelled": common_pb2.FINISH_REASON_CANCELLED,
    "error": common_pb2.FINISH_REASON_ERROR,
}
_FINISH_NAMES = {number: name for name, number in _FINISH.items()}
_STATES = {
    HandoffState.OPEN: transfer_pb.HANDOFF_STATE_OPEN,
    HandoffState.COMPLETE: transfer_pb.HANDOFF_STATE_COMPLETE,
    HandoffState.FAILED: transfer_pb.HANDOFF_STATE_FAILED,
    HandoffState.UNKNOWN: transfer_pb.HANDOFF_STATE_UNKNOWN,
}
_STATE_NAMES = {number: state for state, number in _STATES.items()}


_ROLES = {"prefill": directory_pb2.WORKER_ROLE_PREFILL, "decode": directory_pb2.WORKER_ROLE_DECODE}
_ROLE_NAMES = {number: name for name, number in _ROLES.items()}


def process_id(peer: PeerRef) -> common_pb2.ProcessId:
    """Who speaks."""
    return common_pb2.ProcessId(worker_id=peer.worker_id, epoch=peer.epoch)


def endpoint_to_proto(endpoint: Endpoint) -> transfer_pb.Endpoint:
    """An endpoint as it travels."""
    return transfer_pb.Endpoint(
        peer=common_pb2.Peer(process=process_id(endpoint.peer), address=endpoint.peer.address),
        transport=endpoint.transport,
        layout=transfer_pb.KVLayout(**asdict(endpoint.layout)),
        num_blocks=endpoint.num_blocks,
        base_address=endpoint.base_address,
        device_id=endpoint.device_id,
        memory=endpoint.memory,
        agent_metadata=endpoint.agent_metadata,
        host_id=endpoint.host_id,
    )


def endpoint_from_proto(message: transfer_pb.Endpoint) -> Endpoint:
    """An endpoint as it arrived. Raises ValueError where it names no process or no blocks."""
    process, layout = message.peer.process, message.layout
    if not process.worker_id or not process.epoch:
        raise ValueError("endpoint.peer: worker_id and epoch are required")
    if layout.block_bytes == 0 or message.num_blocks == 0:
        raise ValueError("endpoint.layout: block_bytes and num_blocks are required")
    return Endpoint(
        PeerRef(process.worker_id, process.epoch, message.peer.address),
        message.transport,
        KVLayout(
            dtype=layout.dtype,
            block_size=layout.block_size,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_bytes=layout.block_bytes,
            checksum=layout.checksum,
            weights_fingerprint=layout.weights_fingerprint,
            tokenizer_fingerprint=layout.tokenizer_fingerprint,
            quantization=layout.quantization,
        ),
        message.num_blocks,
        message.base_address,
        message.device_id,
        message.memory,
        message.agent_metadata,
        message.host_id,
    )


def member_to_proto(member: Member) -> directory_pb2.Member:
    """A member as it travels."""
    return directory_pb2.Member(role=_ROLES[member.role], endpoint=endpoint_to_proto(member.endpoint))


def member_from_proto(message: directory_pb2.Member) -> Member:
    """A member as it arrived. Raises ValueError where its role or its process is missing."""
    if message.role not in _ROLE_NAMES:
        raise ValueError("member.role: prefill or decode is required")
    return Member(_ROLE_NAMES[message.role], endpoint_from_proto(message.endpoint))


def change_to_proto(change: Change) -> directory_pb2.JoinResponse:
    """News of the membership as it travels."""
    joined = [member_to_proto(member) for member in change.joined]
    return directory_pb2.JoinResponse(joined=joined, left=[process_id(peer) for peer in change.left])


def change_from_proto(message: directory_pb2.JoinResponse) -> Change:
    """News of the membership as it arrived."""
    return Change(
        tuple(member_from_proto(member) for member in message.joined),
        tuple(PeerRef(left.worker_id, left.epoch) for left in message.left),
    )


def progress_to_proto(progress: Progress, lease_s: float) -> transfer_pb.FollowResponse:
    """News of a handoff as it travels."""
    message = transfer_pb.FollowResponse(
        handoff_id=progress.handoff_id,
        state=_STATES[progress.state],
        reason=progress.reason,
        num_tokens=progress.num_tokens,
        num_blocks=progress.num_blocks,
        blocks=[
            transfer_pb.ReadyBlock(index=block.index, block_id=block.block_id, checksum=block.checksum)
            for block in progress.blocks
        ],
        lease_s=lease_s,
    )
    if (token := progress.first_token) is not None:
        message.first_token.token_id = token.token_id
        message.first_token.logprob = token.logprob
        for token_id, logprob in token.top_logprobs:
            message.first_token.top_logprobs.add(token_id=token_id, logprob=logprob)
        message.finish_reason = _FINISH[token.finish_reason]
    return message


def progress_from_proto(message: transfer_pb.FollowResponse) -> Progress:
    """News of a handoff as it arrived; a state this version does not know reads as FAILED."""
    state = _STATE_NAMES.get(message.state, HandoffState.FAILED)
    blocks = tuple(ReadyBlock(block.index, block.block_id, block.checksum) for block in message.blocks)
    token = None
    if state is HandoffState.COMPLETE:
        first = message.first_token
        top = tuple((item.token_id, item.logprob) for item in first.top_logprobs)
        token = FirstToken(first.token_id, first.logprob, top, _FINISH_NAMES.get(message.finish_reason))
    return Progress(message.handoff_id, state, message.reason, message.num_tokens, message.num_blocks, blocks, token)
