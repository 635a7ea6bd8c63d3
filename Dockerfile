# Two images from one file: `controller` (no torch) and `worker` (torch for CPU; GPU hosts run the worker natively).
FROM node:20-slim AS page
WORKDIR /app/frontend
COPY frontend/package.json frontend/package-lock.json frontend/.npmrc ./
RUN npm ci --omit=dev --no-audit --no-fund

FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 1000 marchline
WORKDIR /app
COPY pyproject.toml constraints.txt ./
COPY scripts/requirements.py scripts/

FROM base AS controller
RUN pip install -c constraints.txt $(python scripts/requirements.py core controller)
COPY wire wire
COPY backend backend
COPY migrations migrations
COPY examples examples
COPY frontend frontend
COPY --from=page /app/frontend/node_modules frontend/node_modules
RUN install -d -o marchline -m 0700 /data
USER marchline
VOLUME /data
EXPOSE 8470
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s CMD ["python", "-c", \
    "import urllib.request as r; r.urlopen('http://127.0.0.1:8470/readyz', timeout=2)"]
CMD ["python", "-m", "backend", "serve", "--host", "0.0.0.0", "--data-dir", "/data", "--job-dir", "/app"]

FROM base AS worker
# For a small image pass PyTorch's index of CPU builds: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=
RUN pip install "$(grep '^torch==' constraints.txt)" \
    && pip install -c constraints.txt $(python scripts/requirements.py core worker examples)
COPY wire wire
COPY worker worker
COPY examples examples
USER marchline
ENTRYPOINT ["python", "-m", "worker"]
