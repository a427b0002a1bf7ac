"""What the gateway can be told."""

from __future__ import annotations

from pydantic import Field

from services.runtime.settings import ProcessSettings


class GatewaySettings(ProcessSettings):
    """Settings of the gateway; `port` is the HTTP port."""

    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0: any free one")
    model: str = Field("smollm2-135m", description="model that the workers serve; its tokenizer is used here")
    served_model_name: str = Field("", description="name that clients use; empty: the model's")
    block_size: int = Field(16, ge=1, description="tokens per KV block in the pools")
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="larger request bodies are refused")
    body_timeout_s: float = Field(60.0, gt=0, description="how long a body may take to arrive")
    max_live_requests: int = Field(2048, ge=1, description="more at once are answered 503")
    request_timeout_s: float = Field(600.0, gt=0, description="the time a request has from arrival to end")
    retry_wait_s: float = Field(10.0, ge=0, description="how long a broken request waits for a decode worker")
    max_attempts: int = Field(3, ge=1, description="attempts per request")
    max_lost_attempts: int = Field(2, ge=1, description="of these, how many may be lost to dying workers")
    renew_s: float = Field(0.5, gt=0, description="interval of renewals")
    renew_deadline_s: float = Field(1.0, gt=0, description="a renewal not answered by then has failed")
    silence_s: float = Field(1.0, gt=0, description="no token for so long: ask for a replay")
    heartbeat_silence_s: float = Field(3.5, gt=0, description="no heartbeat for so long: ask over gRPC")
    ping_s: float = Field(10.0, gt=0, description="an SSE comment is sent when nothing was for so long")
    num_timelines: int = Field(1000, ge=1, description="finished requests that /debug/requests remembers")

    @property
    def public_name(self) -> str:
        """The model's name as clients see it."""
        return self.served_model_name or self.model
