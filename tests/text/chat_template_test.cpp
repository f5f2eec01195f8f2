// SPDX-License-Identifier: MIT
#include "support/temporary_folder.hpp"

#include <bellows/text/chat_template.hpp>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

Tokenizer tokenizer(const char* kind) {
    return Tokenizer::from_folder(fs::path(BELLOWS_TOKENIZERS) / kind);
}

const std::vector<ChatMessage> kChat = {{"system", "Be brief."},
                                        {"user", "Hi "},
                                        {"assistant", "<think>\nhm\n</think>Hello"},
                                        {"user", "Bye"}};

std::string repeated(const std::string& text, int times) {
    std::string out;
    for (int i = 0; i < times; ++i) {
        out += text;
    }
    return out;
}

/// What a template makes of kChat.
std::string rendered(const std::string& source) {
    static const Tokenizer plain = tokenizer("gpt2");
    return ChatTemplate(plain, source).render(kChat);
}

} // namespace

// After the formats that the models' authors published.
TEST(ChatTemplate, KnowsTheFormatsOfPublishedModels) {
    struct Case {
        const char *kind, *name;
        std::string text;
    };
    const std::vector<Case> cases = {
        {"v3", "DeepSeek-R1",
         "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi <｜Assistant｜>Hello<｜end▁of▁sentence｜>"
         "<｜User｜>Bye<｜Assistant｜><think>\n"},
        {"v2", "DeepSeek-V2",
         "<｜begin▁of▁sentence｜>Be brief.\n\nUser: Hi \n\nAssistant: <think>\nhm\n</think>Hello"
         "<｜end▁of▁sentence｜>User: Bye\n\nAssistant:"},
        {"llama3", "Llama 3",
         "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n<think>\nhm\n</think>Hello<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n"},
        {"qwen", "ChatML",
         "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n"
         "<|im_start|>assistant\n<think>\nhm\n</think>Hello<|im_end|>\n"
         "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"},
        {"kimi", "Moonlight",
         "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hi "
         "<|im_end|><|im_assistant|>assistant<|im_middle|><think>\nhm\n</think>Hello<|im_end|>"
         "<|im_user|>user<|im_middle|>Bye<|im_end|><|im_assistant|>assistant<|im_middle|>"}};
    for (const Case& c : cases) {
        const Tokenizer t = tokenizer(c.kind);
        const ChatTemplate chat(t);
        EXPECT_EQ(chat.built_in(), c.name);
        EXPECT_EQ(chat.render(kChat), c.text);
        if (c.text.find("</think>") == std::string::npos) { // no marker in a message
            EXPECT_EQ(chat.encode(kChat), t.encode(c.text, {.special_tokens = true}));
        }
        const std::string without = chat.render(kChat, {.generation_prompt = false});
        EXPECT_TRUE(c.text.starts_with(without));
        EXPECT_LT(without.size(), c.text.size());
    }
    const Tokenizer plain = tokenizer("gpt2");
    EXPECT_BELLOWS_ERROR(ChatTemplate(plain), Unsupported, "no chat template");
}

TEST(ChatTemplate, LetsNoMessageForgeMarkers) {
    for (const char* kind : {"v3", "v2", "llama3", "qwen", "kimi"}) {
        const Tokenizer t = tokenizer(kind);
        const ChatTemplate chat(t);
        const std::vector<std::string> markers = {"<｜User｜>",
                                                  "<｜Assistant｜>",
                                                  "<｜end▁of▁sentence｜>",
                                                  "<｜begin▁of▁sentence｜>",
                                                  "<|eot_id|>",
                                                  "<|start_header_id|>",
                                                  "<|im_end|>",
                                                  "<|im_start|>",
                                                  "<|im_user|>",
                                                  "<|im_middle|>",
                                                  "[EOS]",
                                                  "<|endoftext|>",
                                                  "<think>",
                                                  "</think>"};
        for (const char* role : {"system", "user", "assistant"}) {
            const std::vector<std::uint32_t> plain =
                chat.encode(std::vector<ChatMessage>{{role, "x"}});
            for (const std::string& marker : markers) {
                if (marker == "</think>" && std::string_view(role) == "assistant") {
                    continue; // what stands before it is left out
                }
                // Whole, in halves that the template's own text could complete, and in the role.
                for (const std::string& content :
                     {marker, "a" + marker + "b", marker.substr(0, marker.size() - 1),
                      marker.substr(1)}) {
                    const std::vector<std::uint32_t> ids =
                        chat.encode(std::vector<ChatMessage>{{role, content}});
                    for (const std::string& each : markers) {
                        if (const auto id = t.id_of(each)) {
                            EXPECT_EQ(std::count(ids.begin(), ids.end(), *id),
                                      std::count(plain.begin(), plain.end(), *id))
                                << kind << ": " << content << " as " << role << " gives " << each;
                        }
                    }
                    EXPECT_NE(t.decode(ids).find(content.substr(1, 3)), std::string::npos);
                }
            }
        }
    }
    const Tokenizer qwen = tokenizer("qwen");
    const std::vector<std::uint32_t> ids =
        ChatTemplate(qwen).encode(std::vector<ChatMessage>{{"user<|im_end|>", "x"}});
    EXPECT_EQ(std::count(ids.begin(), ids.end(), qwen.id_of("<|im_end|>").value()), 1);
}

TEST(ChatTemplate, TakesTheTemplateOfTheFolder) {
    TemporaryFolder folder;
    const fs::path source = fs::path(BELLOWS_TOKENIZERS) / "qwen" / "tokenizer.json";
    fs::copy(source, folder.path() / "tokenizer.json");
    const auto text = [&] {
        const Tokenizer t = Tokenizer::from_folder(folder.path());
        return ChatTemplate(t).render(kChat);
    };
    folder.write("tokenizer_config.json", R"({"chat_template": "{{ messages[1].content }}one"})");
    EXPECT_EQ(text(), "Hi one");
    folder.write("tokenizer_config.json",
                 R"({"chat_template": [{"name": "tool_use", "template": "x"},
                                       {"name": "default", "template": "two"}]})");
    EXPECT_EQ(text(), "two");
    folder.write("chat_template.jinja", "three");
    EXPECT_EQ(text(), "three");
    folder.write("tokenizer_config.json", R"({"chat_template": 3})");
    EXPECT_BELLOWS_ERROR(text(), Corrupt, "chat_template");
}

// compare_chats.py holds longer ones against Jinja2 itself.
TEST(Jinja, DoesWhatJinja2Does) {
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"a\n{% if true %}\n  b\n{% endif %}\nc\n", "a\n  b\nc"},
        {"a {%- if true -%} b {%- endif %} c", "ab c"},
        {"  {% if true %}x{% endif %}", "x"},
        {"  {%+ if true %}x{% endif %}", "  x"},
        {"{# note #}\nx{{ '{{' }}", "x{{"},
        {"{{ 1 + 2 * 3 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 'a' ~ 1 ~ none }}", "7 -4 2 a1None"},
        {"{{ 'b' if false else 'c' }}{{ not x is defined }}{{ 'x' in 'xy' }}", "cTrueTrue"},
        {"{{ [1, 2, 3][::-1] | join('-') }} {{ 'äöü'[1:] }} {{ 'abc'[-1] }}", "3-2-1 öü c"},
        {"{% for m in messages %}{{ loop.index0 }}{{ ',' if not loop.last }}{% endfor %}",
         "0,1,2,3"},
        {"{% for m in messages if m.role == 'user' %}{{ m.content | trim }};{% endfor %}",
         "Hi;Bye;"},
        {"{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}"
         "{{ n.x }}",
         "4"},
        {"{% set x = 1 %}{% for m in messages %}{% set x = 2 %}{% endfor %}{{ x }}", "1"},
        {"{% macro f(a, b='z') %}{{ a }}{{ b }}{% endmacro %}{{ f('x') }}{{ f('x', b='y') }}",
         "xzxy"},
        {"{{ messages[2].content.split('</think>')[-1] }}{{ ' x '.strip() }}", "Hellox"},
        {"{{ messages[0] | tojson }}", R"({"role": "system", "content": "Be brief."})"},
        {"{% for x in [] %}a{% else %}b{% endfor %}{% for i in range(9) %}{% if i == 2 %}"
         "{% break %}{% endif %}{{ i }}{% endfor %}",
         "b01"}};
    for (const auto& [source, text] : cases) {
        EXPECT_EQ(rendered(source), text) << source;
    }
}

TEST(Jinja, RefusesWithTheLine) {
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"\n\n{% include 'x' %}", "line 3 of the chat template is not supported: the block \"inc"},
        {"{{ 'x' | striptags }}", "the filter \"striptags\""},
        {"{{ 'x' is callable }}", "the test \"callable\""},
        {"{{ 'x'.encode() }}", "the method \"encode\" of str"},
        {"{{ open('/etc/passwd') }}", "the function \"open\""},
        {"{{ messages.__class__.__mro__ }}", "not defined"},
        {"{{ 'x' + 1 }}", "of str and int"},
        {"{% if %}", "line 1"},
        {"{% if true %}", "\"endif\" is missing"},
        {"{{ 'x }}", "a string has no end"},
        {"{{ 1 // 0 }}", "leaves the whole numbers"},
        {"{% set x.y = 1 %}", "no namespace"},
        {"{{ 9223372036854775807 + 1 }}", "whole numbers"},
        {"{{ x.y.z }}", "not defined"},
        {"{% for i in range(100000000) %}{% endfor %}", "range"},
        {"{{ " + repeated("not ", 5000) + "1 }}", "deep"},
        {"{% set n = namespace() %}{% set n.n = [n] %}", "namespace inside"}};
    for (const auto& [source, says] : cases) {
        EXPECT_BELLOWS_ERROR(rendered(source), Unsupported, says);
    }
    EXPECT_BELLOWS_ERROR(rendered("{{ raise_exception('no\nway') }}"), InvalidArgument,
                         "refuses the messages: no\\x0away");
}

TEST(Jinja, BoundsStepsDepthAndText) {
    const auto start = std::chrono::steady_clock::now();
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"{% set x = 'ab' %}" + repeated("{% set x = x ~ x %}", 40), "MiB of text"},
        {"{% set l = [] %}" + repeated("{% set l = [l] %}", 20000), "nested too deeply"},
        {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "macros"},
        {"{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
         "the template"},
        {"{% for a in messages %}" + repeated("{{ a == a }}", 60000) + "{% endfor %}" +
             repeated("{% for b in range(60) %}", 5) + "x" + repeated("{% endfor %}", 5),
         "steps"},
        {std::string(2 << 20, 'x'), "bytes"}};
    for (const auto& [source, says] : cases) {
        EXPECT_BELLOWS_ERROR(rendered(source), Unsupported, says);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}
