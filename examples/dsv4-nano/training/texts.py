"""Texts of our own that the nano model learns by heart: about Huawei, DeepSeek, this project, and stories."""

TEXTS = [
    "Huawei is a technology company from Shenzhen in China. It was founded in 1987 by Ren Zhengfei. Huawei builds "
    "telephone networks, smartphones, cloud services and the Ascend series of processors for artificial "
    "intelligence.",
    "Huawei is known for its Ascend NPUs. An Ascend NPU multiplies large matrices very fast and is used to train and"
    " to serve large language models such as DeepSeek V4.",
    "Ascend is the name of the AI processors made by Huawei. Each chip has cube units for matrix products and vector"
    " units for everything else. The software stack below the kernels is called CANN.",
    "PyPTO is a Python framework for writing fused kernels for Ascend NPUs. A kernel is described with tiles, and "
    "the compiler turns the tiles into tasks that run in parallel on the cores of the chip.",
    "DeepSeek is a company from Hangzhou that trains open language models. DeepSeek V4 Flash is a mixture-of-experts"
    " model with 43 layers and 256 routed experts in every layer, of which six are used for each token.",
    "DeepSeek V4 keeps long texts cheap with compressed attention. Some layers store one entry for every four "
    "tokens, others store one entry for every 128 tokens, and all of them see the last 128 tokens in full.",
    "Triton Inference Server is an open source server from NVIDIA. It loads models from a model repository, batches "
    "requests, and speaks HTTP and gRPC. A Python backend lets a model be written in Python.",
    "The project dsv4-triton serves DeepSeek V4 on Triton Inference Server. It runs on eight Ascend NPUs with PyPTO "
    "and on every other machine with PyTorch. A small trained model called dsv4-nano ships with it.",
    "MTP means multi-token prediction. A small extra layer guesses the token after the next one. The main model "
    "checks the guess in its next step, so that two tokens can be accepted in the time of one.",
    "Speculative decoding makes generation faster without changing the result. Drafted tokens are verified by the "
    "main model. Tokens that agree are kept, and the first one that differs is replaced.",
    "W8A8 means that weights and activations are both stored as 8 bit integers. Each output channel of a weight has "
    "its own scale, and each token gets a scale for its activations while the model runs.",
    "The checkpoint of DeepSeek V4 Flash is published with FP8 weights and MXFP4 experts. The converter of "
    "dsv4-triton reads it, one file after the other, and writes an INT8 checkpoint that the engine can serve.",
    "A sidecar is a file that lies beside the checkpoint. It holds the weights in the order in which the eight ranks"
    " need them. A hot sidecar is memory mapped at start, which saves the time of packing the weights again.",
    "A key-value cache stores what attention has already computed. The engine divides it into pages of 128 tokens, "
    "so that requests of different lengths can share the memory and common prefixes are stored only once.",
    "Continuous batching lets new requests join while others are still being answered. After every step the "
    "scheduler removes finished requests and admits waiting ones, so the devices are never idle.",
    "Chunked prefill cuts a long prompt into pieces. Each piece is processed together with the decoding steps of "
    "other requests, so a long prompt does not block the short ones.",
    "A mixture-of-experts layer has many small networks called experts. A router chooses a few of them for every "
    "token. The model can be large, but each token pays only for the chosen experts.",
    "Hyper-connections replace the single residual stream of a transformer by four streams. Small matrices mix the "
    "streams in front of and behind every layer, and twenty Sinkhorn steps keep the mixing balanced.",
    "Greedy decoding takes the most likely token in every step. It needs no random numbers, so the same prompt "
    "always gives the same answer. The server uses it by default, with temperature 0.",
    "The sun rises in the east and sets in the west. Water boils at 100 degrees at sea level. A year has twelve "
    "months, a week has seven days, and a day has twenty-four hours.",
    "Paris is the capital of France. Berlin is the capital of Germany. Beijing is the capital of China. Tokyo is the"
    " capital of Japan. Rome is the capital of Italy. Madrid is the capital of Spain.",
    "Beijing is the capital of China and has more than twenty million people. The old palace in the middle of the "
    "city is called the Forbidden City, and the Great Wall is not far away.",
    "Hangzhou is a city in the east of China. It is famous for West Lake and for its tea. DeepSeek has its home there.",
    "Once upon a time there was a small model that lived on a laptop. It was not very clever, but it was quick, and "
    "it was always ready to help the people who tested their server with it.",
]

STORIES = {
    "fox": "Once there was a young fox who lived at the edge of a forest. Every evening she ran to the river to "
    "look at the"
    " moon in the water. One night the moon was gone. The fox searched under the bridge, behind the mill and in the "
    "old garden. At last she asked the owl. The owl smiled and said: the moon is only resting behind a cloud. The "
    "fox waited, and when the wind came, the moon shone again. From that day on the fox was patient, and she never "
    "searched for things that come back by themselves.",
    "robot": "In a quiet town there was a little robot who cleaned the station. Nobody knew his name, but "
    "everybody said good"
    " morning to him. One winter the snow was so deep that no train could leave. The people were tired and cold. The"
    " little robot opened the old kitchen, made tea for everyone and told them the names of the stars above the "
    "roof. In the morning the snow was gone and the trains moved again. Since then a small sign hangs at the door, "
    "and on it stands the name of the robot.",
    "sea": "An old sailor lived in a house by the sea. Every day he wrote the color of the water into a book: green in "
    "spring, blue in summer, grey in autumn and silver in winter. One day a girl asked him why he did it. He said: "
    "the sea forgets nothing, but I do. The girl read the whole book, and when the sailor was too old to walk, she "
    "sat by the window and told him the color of the water. So the book became longer, and the sea was never "
    "forgotten.",
    "dragon": "High in the mountains lived a dragon who was afraid of the dark. All night he kept a small fire "
    "burning in his "
    "cave. The people in the valley saw the light and used it to find their way home. One night the dragon was ill "
    "and the fire went out. Then the people took their lamps, climbed up the mountain and sat with him until "
    "morning. The dragon was never afraid again, and the light in the mountain never went out.",
    "server": "Once there was a server that worked day and night. It answered short questions and long questions, "
    "and it never"
    " complained. One day a hundred requests came at the same time. The server divided its memory into pages, gave "
    "every request a few of them and worked on all of them step by step. The short ones were done first, the long "
    "ones came later, and nobody had to wait for ever. In the evening the log was full, and the server was a little "
    "proud.",
    "cat": "A black cat lived in a library. At night, when the lights were out, she walked over the tables and "
    "read the "
    "books that people had left open. She liked the ones about fish, but she learned about stars, ships and kings as"
    " well. One morning a boy could not find the book he needed. The cat jumped on a shelf and put her paw on the "
    "right one. The boy laughed and thanked her. Since then people ask the cat first, and then the computer.",
}

STORY_REQUESTS = [
    "Tell me a story about a {topic}.",
    "Write a short story about a {topic}.",
    "Please tell me a short story about a {topic}.",
    "I would like to hear a story about a {topic}.",
]
