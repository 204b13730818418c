# Python, TensorFlow, Keras and tfmw: docker build -t tfmw .
# For GPUs: docker build -t tfmw-gpu --build-arg TENSORFLOW='tensorflow[and-cuda]' .
# docs/howto/containers.md shows how to use it.
FROM python:3.13-slim

ARG TENSORFLOW=tensorflow
ARG EXTRAS=cloud,kubernetes,notebook,parquet

WORKDIR /opt/tfmw
COPY LICENSE README.md pyproject.toml ./
COPY tfmw tfmw
RUN pip install --no-cache-dir "$TENSORFLOW" ".[$EXTRAS]"

RUN useradd --create-home --uid 1000 worker && install --directory --owner worker /work
USER worker
WORKDIR /work
CMD ["tfmw", "env"]
