// SPDX-License-Identifier: MIT
#include "built_in_templates.hpp"

namespace bellows::text {

namespace {

const BuiltInTemplate kDeepSeekV2 = {"DeepSeek-V2", R"({{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ 'User: ' + message.content + '\n\n' }}
{%- elif message.role == 'assistant' %}{{ 'Assistant: ' + message.content + eos_token }}
{%- elif message.role == 'system' %}{{ message.content + '\n\n' }}
{%- else %}{{ raise_exception('the role ' + message.role + ' is unknown') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %})"};

// With `thinks` it begins the answer with its reasoning, as R1; that of older answers is left out.
const BuiltInTemplate kDeepSeekV3 = {"DeepSeek-V3", R"({{ bos_token }}
{%- for message in messages if message.role == 'system' %}
{{- message.content if loop.first else '\n\n' + message.content }}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + eos_token }}
{%- elif message.role != 'system' %}
{{- raise_exception('the role ' + message.role + ' is unknown') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}
{%- if add_generation_prompt and thinks %}{{ '<think>\n' }}{% endif %})"};

const BuiltInTemplate kLlama3 = {"Llama 3", R"({{ bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %})"};

const BuiltInTemplate kChatMl = {"ChatML", R"(
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %})"};

const BuiltInTemplate kMoonlight = {"Moonlight", R"(
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
{{- '<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>' }}
{%- endif %}
{%- if message.role == 'system' %}{{ '<|im_system|>' }}
{%- elif message.role == 'user' %}{{ '<|im_user|>' }}
{%- elif message.role == 'assistant' %}{{ '<|im_assistant|>' }}
{%- else %}{{ raise_exception('the role ' + message.role + ' is unknown') }}
{%- endif %}
{{- message.role + '<|im_middle|>' + message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %})"};

} // namespace

std::optional<BuiltInTemplate> built_in_template(const Tokenizer& tokenizer) {
    const auto has = [&](const char* token) { return tokenizer.id_of(token).has_value(); };
    if (has("<｜User｜>") && has("<｜Assistant｜>")) {
        return has("<think>")
                   ? BuiltInTemplate{"DeepSeek-R1", "{% set thinks = true %}" + kDeepSeekV3.source}
                   : kDeepSeekV3;
    }
    if (has("<｜begin▁of▁sentence｜>")) {
        return kDeepSeekV2;
    }
    if (has("<|start_header_id|>") && has("<|end_header_id|>") && has("<|eot_id|>")) {
        return kLlama3;
    }
    if (has("<|im_middle|>") && has("<|im_user|>")) {
        return kMoonlight;
    }
    if (has("<|im_start|>") && has("<|im_end|>")) {
        return kChatMl;
    }
    return std::nullopt;
}

} // namespace bellows::text
