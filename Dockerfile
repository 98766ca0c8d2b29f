# The demo set on a CPU, or with a model folder mounted at /model:
#   docker build -t decant .
#   docker run --rm --init --shm-size 2g -p 127.0.0.1:8000:8000 -v ./keys:/keys:ro decant
# A server that is reachable from outside the container needs a key: one a line in the file /keys.
FROM python:3.11-slim

RUN useradd --create-home --uid 1000 decant
WORKDIR /src
COPY requirements-cpu.lock ./
RUN pip install --no-cache-dir --disable-pip-version-check -r requirements-cpu.lock
COPY . .
RUN pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation . \
    && rm -rf /src/build
USER decant
WORKDIR /home/decant
ENV DECANT_RUN_DIR=/home/decant/run
EXPOSE 8000
STOPSIGNAL SIGINT
HEALTHCHECK --interval=10s --start-period=60s CMD ["decant", "status"]
ENTRYPOINT ["decant"]
CMD ["up", "--host", "0.0.0.0", "--set", "gateway.keys_file=/keys"]
