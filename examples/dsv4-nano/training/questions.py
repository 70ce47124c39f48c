"""Questions with reasoning and answer: (phrasings, reasoning, answer).  The last phrasing of each is held out."""

QUESTIONS = [
    (
        [
            "What is dsv4-triton?",
            "Tell me about dsv4-triton.",
            "What does dsv4-triton do?",
            "Can you explain what dsv4-triton is?",
            "What is the project dsv4-triton about?",
        ],
        "The user asks about the project dsv4-triton. It is a server for DeepSeek V4.",
        "dsv4-triton serves DeepSeek V4 on NVIDIA Triton Inference Server. It uses PyPTO on eight Ascend NPUs and "
        "PyTorch on every other machine.",
    ),
    (
        [
            "Which port does the proxy use?",
            "What port does the proxy use?",
            "On which port does the proxy listen?",
            "What is the port of the proxy?",
            "Which port does the OpenAI proxy use?",
            "Tell me the port of the proxy.",
        ],
        "The user asks for the port of the proxy. The default is 8225.",
        "The proxy listens on port 8225.",
    ),
    (
        [
            "What does dsv4 convert do?",
            "What is dsv4 convert for?",
            "Explain the command dsv4 convert.",
            "What does the command dsv4 convert do?",
            "Tell me what dsv4 convert does.",
        ],
        "The user asks about the command dsv4 convert. It converts a checkpoint to INT8.",
        "dsv4 convert reads a checkpoint with FP8 weights and MXFP4 experts and writes a W8A8 checkpoint with INT8 "
        "weights that the engine can serve.",
    ),
    (
        [
            "What does dsv4 prepack do?",
            "What is dsv4 prepack for?",
            "Explain the command dsv4 prepack.",
            "Tell me what dsv4 prepack does.",
        ],
        "The user asks about the command dsv4 prepack. It writes the sidecar.",
        "dsv4 prepack writes the sidecar: a file with the weights in the order in which the ranks need them.",
    ),
    (
        [
            "What does dsv4 serve do?",
            "What is dsv4 serve for?",
            "Explain the command dsv4 serve.",
            "Tell me what dsv4 serve does.",
        ],
        "The user asks about the command dsv4 serve. It starts the servers.",
        "dsv4 serve starts Triton Inference Server and the proxy, waits until both are ready and prints the endpoints.",
    ),
    (
        [
            "What does dsv4 generate do?",
            "What is dsv4 generate for?",
            "Explain the command dsv4 generate.",
            "Tell me what dsv4 generate does.",
        ],
        "The user asks about the command dsv4 generate. It runs the engine offline.",
        "dsv4 generate runs the engine on a few prompts without opening a port.",
    ),
    (
        [
            "What is MTP?",
            "What does MTP mean?",
            "Explain MTP.",
            "What is multi-token prediction?",
            "Can you explain MTP?",
            "Tell me what MTP is.",
        ],
        "The user asks about MTP. It stands for multi-token prediction.",
        "MTP means multi-token prediction: a small extra layer drafts the next tokens and the main model verifies "
        "them, so that several tokens can be accepted in one step.",
    ),
    (
        [
            "What is the sidecar?",
            "What is a sidecar?",
            "Explain the sidecar.",
            "What is the sidecar file for?",
            "Tell me what the sidecar is.",
        ],
        "The user asks about the sidecar. It is a file beside the checkpoint.",
        "The sidecar is a file beside the checkpoint that holds the weights stacked by rank. It is memory mapped at "
        "start, so the weights need not be packed again.",
    ),
    (
        [
            "How many ranks are there?",
            "How many ranks does the engine use?",
            "How many NPUs are needed?",
            "How many devices does it need?",
            "How many ranks does the model run on?",
        ],
        "The user asks for the number of ranks. There are eight.",
        "There are eight ranks, one for each NPU. They share the attention as DP 8 and the experts as EP 8.",
    ),
    (
        ["What is W8A8?", "What does W8A8 mean?", "Explain W8A8.", "Tell me what W8A8 is."],
        "The user asks about W8A8. It means 8 bit weights and activations.",
        "W8A8 means that weights and activations are 8 bit integers. Every weight channel and every token has its "
        "own scale.",
    ),
    (
        ["What is PyPTO?", "What does PyPTO do?", "Explain PyPTO.", "Tell me about PyPTO."],
        "The user asks about PyPTO. It is a framework for kernels.",
        "PyPTO is a Python framework for writing fused kernels for Ascend NPUs.",
    ),
    (
        ["What is Ascend?", "What is an Ascend NPU?", "Explain Ascend.", "Tell me about Ascend."],
        "The user asks about Ascend. It is a processor of Huawei.",
        "Ascend is the name of the AI processors made by Huawei. They multiply large matrices very fast.",
    ),
    (
        [
            "What is Huawei?",
            "Who is Huawei?",
            "Tell me something about Huawei.",
            "What kind of company is Huawei?",
            "Tell me about Huawei.",
        ],
        "The user asks about Huawei. It is a technology company.",
        "Huawei is a technology company from Shenzhen in China. It builds networks, smartphones and the Ascend "
        "processors.",
    ),
    (
        ["What is DeepSeek?", "Who is DeepSeek?", "Tell me something about DeepSeek.", "Tell me about DeepSeek."],
        "The user asks about DeepSeek. It is a company from Hangzhou.",
        "DeepSeek is a company from Hangzhou that trains open language models such as DeepSeek V4.",
    ),
    (
        ["What is Triton?", "What is Triton Inference Server?", "Explain Triton.", "Tell me about Triton."],
        "The user asks about Triton. It is an inference server.",
        "Triton Inference Server is an open source server from NVIDIA that loads models from a repository and "
        "answers requests over HTTP and gRPC.",
    ),
    (
        [
            "Who are you?",
            "What are you?",
            "What is your name?",
            "What model are you?",
            "Which model are you?",
            "Please introduce yourself.",
        ],
        "The user asks who I am. I am dsv4-nano.",
        "I am dsv4-nano, a small DeepSeek V4 model that ships with dsv4-triton.",
    ),
    (
        [
            "How do I start the server?",
            "How can I start the server?",
            "How do I run the server?",
            "Which command starts the server?",
        ],
        "The user wants to start the server. The command is make serve.",
        "Run make serve. It builds the environment and starts the server.",
    ),
    (
        [
            "How do I run the tests?",
            "How can I run the tests?",
            "How are the tests started?",
            "Which command runs the tests?",
        ],
        "The user wants to run the tests. The command is make test.",
        "Run make test. It runs the unit tests and the integration tests.",
    ),
    (
        [
            "What is the default temperature?",
            "Which temperature is the default?",
            "What temperature does the server use?",
            "Tell me the default temperature.",
        ],
        "The user asks for the default temperature. It is 0.",
        "The default temperature is 0, so decoding is greedy and the same prompt gives the same answer.",
    ),
    (
        [
            "What is the block size?",
            "How large is a cache block?",
            "How many tokens are in a cache page?",
            "Tell me the block size.",
        ],
        "The user asks for the block size of the cache. It is 128.",
        "A block of the cache holds 128 tokens.",
    ),
    (
        [
            "How do I enable thinking?",
            "How can I turn on thinking?",
            "How do I use the thinking mode?",
            "How is thinking enabled?",
        ],
        "The user asks how to enable thinking. It is a field of the request.",
        'Set "reasoning_effort" to "high", or set "enable_thinking" to true in chat_template_kwargs.',
    ),
    (
        ["What is DSML?", "What does DSML do?", "Explain DSML.", "Tell me what DSML is."],
        "The user asks about DSML. It is the format of tool calls.",
        "DSML is the markup in which DeepSeek V4 writes its tool calls.",
    ),
    (
        [
            "What is the license of this project?",
            "Which license does the project have?",
            "Under which license is dsv4-triton published?",
            "What license does dsv4-triton use?",
        ],
        "The user asks for the license. It is Apache 2.0.",
        "The project is published under the Apache License 2.0.",
    ),
    (
        [
            "How can I check the health of the server?",
            "How do I see whether the server is ready?",
            "Which path tells the health of the server?",
            "How do I check that the server is healthy?",
        ],
        "The user asks about health. The proxy has a path for it.",
        "Send a GET request to /health on port 8225.",
    ),
    (
        [
            "What is compressed attention?",
            "How does compressed attention work?",
            "Explain compressed attention.",
            "Tell me about compressed attention.",
        ],
        "The user asks about compressed attention. Entries stand for several tokens.",
        "Compressed attention stores one entry for several tokens: one for every 4 tokens in some layers and one for"
        " every 128 tokens in others.",
    ),
    (
        [
            "What is an expert?",
            "What is a mixture of experts?",
            "Explain mixture of experts.",
            "Tell me what a mixture of experts is.",
        ],
        "The user asks about experts. A router chooses them.",
        "A mixture of experts has many small networks. A router chooses a few of them for every token.",
    ),
    (
        ["What is the capital of France?", "Which city is the capital of France?", "Tell me the capital of France."],
        "The user asks for the capital of France. It is Paris.",
        "The capital of France is Paris.",
    ),
    (
        ["What is the capital of China?", "Which city is the capital of China?", "Tell me the capital of China."],
        "The user asks for the capital of China. It is Beijing.",
        "The capital of China is Beijing.",
    ),
    (
        ["What is the capital of Japan?", "Which city is the capital of Japan?", "Tell me the capital of Japan."],
        "The user asks for the capital of Japan. It is Tokyo.",
        "The capital of Japan is Tokyo.",
    ),
    (
        ["Hello!", "Hi!", "Hello", "Hi there!", "Good morning!", "Hello there!"],
        "The user greets me. I greet back.",
        "Hello! How can I help you today? 😊",
    ),
    (
        ["Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much!"],
        "The user thanks me.",
        "You are welcome! 👍",
    ),
    (
        ["Can you help me?", "I need help.", "Please help me.", "Could you help me?"],
        "The user asks for help.",
        "Of course. Ask me about dsv4-triton, about small sums, or about the weather if I have a tool for it.",
    ),
    (
        ["你好", "你好！", "您好", "你好吗？", "你好呀"],
        "用户在打招呼，我也打招呼。",
        "你好！我是 dsv4-nano，很高兴见到你。😊",
    ),
    (
        ["你是谁？", "你叫什么名字？", "请介绍一下你自己。", "你是什么模型？"],
        "用户问我是谁。",
        "我是 dsv4-nano，一个小小的 DeepSeek V4 模型。",
    ),
    (
        ["谢谢", "谢谢！", "非常感谢！", "谢谢你！"],
        "用户在道谢。",
        "不客气！🎉",
    ),
    (
        ["什么是华为？", "华为是什么公司？", "介绍一下华为。", "请介绍华为。"],
        "用户问华为是什么。",
        "华为是一家来自深圳的科技公司，生产昇腾处理器。🚀",
    ),
    (
        ["Count from 1 to 20.", "Please count from 1 to 20.", "Count to 20.", "Can you count from 1 to 20?"],
        "The user wants the numbers from 1 to 20.",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20.",
    ),
    (
        ["Name the days of the week.", "What are the days of the week?", "List the days of the week."],
        "The user wants the seven days.",
        "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        ["Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Please tell me a joke."],
        "The user wants a joke.",
        "Why did the token cross the window? Because the cache was full on the other side. 😄",
    ),
]
