// tiny_models.h: models for tests of weights on disk, a table of tensors for them, and a folder to write in.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "llmc/tensors.h"

namespace {

[[maybe_unused]] ModelConfig tiny_llama() {
    ModelConfig m;
    m.layers = 2, m.channels = 24, m.heads = 12, m.kv_heads = 12, m.head_size = 4, m.ffn = 36, m.vocab = 53, m.max_positions = 32;
    return m;
}
[[maybe_unused]] ModelConfig tiny_gpt() {
    ModelConfig m = tiny_llama();
    m.arch = Arch::GPT, m.head_size = 2, m.rotary = false, m.tie = true;
    return m;
}

[[maybe_unused]] std::vector<TensorSpec> tiny_specs(const ModelConfig& m) {
    const i64 C = m.channels, A = m.attn_width(), K = m.kv_heads * m.head_size, F = m.ffn, V = m.vocab;
    const bool llama = m.is_llama(), conv1d = !llama;  // GPT-2 stores [in, out]
    std::vector<TensorSpec> specs;
    const auto matrix = [&](const std::string& name, i64 cols, std::vector<HfPart> parts, Split split, Init init = Init::NORMAL) {
        specs.push_back({name, cols, std::move(parts), split, init, true, false});
    };
    const auto vector = [&](const std::string& name, std::vector<HfPart> parts, Split split, Init init) {
        specs.push_back({name, 0, std::move(parts), split, init, false, false});
    };
    const auto norm = [&](const std::string& name, const std::string& hf) {
        vector(name, {{hf + ".weight", C, 0, C, false}}, Split::NONE, Init::ONE);
        if (!llama) { vector(name + "_bias", {{hf + ".bias", C, 0, C, false}}, Split::NONE, Init::ZERO); }
    };
    matrix("embedding", C, {{llama ? "model.embed_tokens.weight" : "wte.weight", V, 0, V, false}}, Split::VOCAB);
    if (!m.rotary) {
        matrix("position", C, {{"wpe.weight", m.max_positions, 0, m.max_positions, false}}, Split::NONE);
        specs.back().complete_gradient = true;
    }
    for (i64 l = 0; l < m.layers; l++) {
        const std::string ours = "layers." + std::to_string(l) + ".";
        const std::string hf = (llama ? "model.layers." : "h.") + std::to_string(l) + ".";
        norm(ours + "norm1", hf + (llama ? "input_layernorm" : "ln_1"));
        if (llama) {
            matrix(ours + "qkv", C,
                   {{hf + "self_attn.q_proj.weight", A, 0, A, false},
                    {hf + "self_attn.k_proj.weight", K, 0, K, false},
                    {hf + "self_attn.v_proj.weight", K, 0, K, false}},
                   Split::ROWS);
        } else {
            const std::string w = hf + "attn.c_attn.weight", b = hf + "attn.c_attn.bias";
            matrix(ours + "qkv", C, {{w, A, 0, 3 * A, true}, {w, A, A, 3 * A, true}, {w, A, 2 * A, 3 * A, true}}, Split::ROWS);
            vector(ours + "qkv_bias", {{b, A, 0, 3 * A, false}, {b, A, A, 3 * A, false}, {b, A, 2 * A, 3 * A, false}}, Split::ROWS,
                   Init::ZERO);
        }
        const std::string out = hf + (llama ? "self_attn.o_proj" : "attn.c_proj"), down = hf + (llama ? "mlp.down_proj" : "mlp.c_proj");
        matrix(ours + "attn_out", A, {{out + ".weight", C, 0, C, conv1d}}, Split::COLS, Init::NORMAL_RESIDUAL);
        if (!llama) { vector(ours + "attn_out_bias", {{out + ".bias", C, 0, C, false}}, Split::NONE, Init::ZERO); }
        norm(ours + "norm2", hf + (llama ? "post_attention_layernorm" : "ln_2"));
        if (llama) {
            matrix(ours + "up", C, {{hf + "mlp.gate_proj.weight", F, 0, F, false}, {hf + "mlp.up_proj.weight", F, 0, F, false}},
                   Split::ROWS);
        } else {
            matrix(ours + "up", C, {{hf + "mlp.c_fc.weight", F, 0, F, true}}, Split::ROWS);
            vector(ours + "up_bias", {{hf + "mlp.c_fc.bias", F, 0, F, false}}, Split::ROWS, Init::ZERO);
        }
        matrix(ours + "down", F, {{down + ".weight", C, 0, C, conv1d}}, Split::COLS, Init::NORMAL_RESIDUAL);
        if (!llama) { vector(ours + "down_bias", {{down + ".bias", C, 0, C, false}}, Split::NONE, Init::ZERO); }
    }
    norm("final_norm", llama ? "model.norm" : "ln_f");
    if (!m.tie) { matrix("head", C, {{"lm_head.weight", V, 0, V, false}}, Split::VOCAB); }
    return specs;
}

// A new folder, removed at the end of the scope.
struct TempDir {
    std::string path;
    TempDir() {
        const char* base = getenv("TMPDIR");
        path = std::string(base ? base : "/tmp") + "/caat test XXXXXX";  // with spaces, as users' folders have
        check(mkdtemp(path.data()), "cannot make a folder in '%s'", path.c_str());
    }
    ~TempDir() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
};

[[maybe_unused]] void write_file(const std::string& path, std::string_view bytes) {
    File file(path, "wb");
    file.write(bytes.data(), bytes.size());
    file.close();
}

// The message of the Error that work() throws, "" if it throws none.
template <typename Work>
std::string message_of(const Work& work) {
    try {
        work();
        return "";
    } catch (const Error& e) { return e.what(); }
}

[[maybe_unused]] void expect_mentions(const std::string& message, const std::vector<std::string>& words) {
    for (const std::string& word : words) { EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message; }
}

}  // namespace
