#!/usr/bin/env bash
# Chat, streaming, completions and health with curl.
set -euo pipefail
api="${OPENAI_BASE_URL:-http://127.0.0.1:8225/v1}"

echo "# health"
curl --noproxy '*' --silent --show-error --fail "${api%/v1}/health/ready"
echo

echo "# chat"
curl --noproxy '*' --silent --show-error --fail "$api/chat/completions" \
  -H 'Content-Type: application/json' \
  -d '{"messages": [{"role": "user", "content": "What is 1+1?"}], "max_tokens": 32}'
echo

echo "# chat with thinking, streamed"
curl --noproxy '*' --silent --show-error --fail --no-buffer "$api/chat/completions" \
  -H 'Content-Type: application/json' \
  -d '{"messages": [{"role": "user", "content": "What is 1+1?"}], "max_tokens": 64, "stream": true,
       "reasoning_effort": "high"}'

echo "# completion"
curl --noproxy '*' --silent --show-error --fail "$api/completions" \
  -H 'Content-Type: application/json' \
  -d '{"prompt": "Huawei is", "max_tokens": 20}'
echo
