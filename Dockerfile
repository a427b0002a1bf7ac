# Two images: `docker build --target gateway .` has no torch, `docker build --target worker .` has all that computes.
# The default model is made once, at build time, and lies in both; nothing is fetched when a pod starts.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS base
RUN useradd --uid 10001 --create-home pdserve
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PDSERVE_CACHE=/opt/pdserve/cache HF_HOME=/cache/huggingface
WORKDIR /opt/pdserve
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY services services
COPY bench bench

FROM base AS worker
# the CPU kernels are compiled for the processor they run on, when a pod starts; so are Triton's launchers
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install -c constraints.txt '.[worker]'
ARG MODEL=smollm2-135m
RUN python -c "import sys; from services.runtime import model_store; model_store.resolve(sys.argv[1])" "$MODEL" && \
    mkdir -p cache/kernels && chown 10001 cache/kernels && \
    cp -r cache gateway-cache && find gateway-cache -name '*.safetensors' -delete
USER 10001
CMD ["python", "-m", "services.decode"]

FROM base AS gateway
RUN pip install -c constraints.txt '.[gateway]'
COPY --from=worker /opt/pdserve/gateway-cache cache
USER 10001
CMD ["python", "-m", "services.gateway"]
