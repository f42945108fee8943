// huggingface_export.h: writes a model as a Hugging Face folder, config.json and model.safetensors (F32), that transformers
// and --init-from read: the inverse of huggingface.h.
#pragma once

#include <filesystem>
#include <functional>

#include "huggingface.h"

// What read_hf_config reads back as the same model.
inline json hf_config(const ModelConfig& m) {
    json c = {{"vocab_size", m.vocab}, {"tie_word_embeddings", m.tie}, {"torch_dtype", "float32"}};
    if (m.is_llama()) {
        c.update({{"model_type", "llama"}, {"architectures", {"LlamaForCausalLM"}}, {"hidden_act", "silu"}, {"hidden_size", m.channels},
                  {"intermediate_size", m.ffn}, {"num_hidden_layers", m.layers}, {"num_attention_heads", m.heads},
                  {"num_key_value_heads", m.kv_heads}, {"head_dim", m.head_size}, {"max_position_embeddings", m.max_positions},
                  {"rms_norm_eps", m.norm_eps}, {"rope_theta", m.rope_base}, {"attention_bias", false}, {"mlp_bias", false}});
    } else {
        c.update({{"model_type", "gpt2"}, {"architectures", {"GPT2LMHeadModel"}}, {"activation_function", "gelu_new"}, {"n_embd", m.channels},
                  {"n_inner", m.ffn}, {"n_layer", m.layers}, {"n_head", m.heads}, {"n_positions", m.max_positions},
                  {"layer_norm_epsilon", m.norm_eps}});
        if (m.rotary) { c.update({{"caat_positions", "rotary"}, {"rope_theta", m.rope_base}}); }
    }
    return c;
}

// Writes the tensors of `table`, that of one rank (T = 1); read(t, values) gives a tensor's values. Never holds more than the largest of
// them. The folder must be new or empty; config.json comes last: a folder without it is not whole.
inline void export_hf(const std::string& dir, const ModelConfig& model, const ParameterTable& table,
                      const std::function<void(const Tensor&, float*)>& read) {
    std::error_code ec;
    std::filesystem::create_directories(dir, ec);
    check(!ec, "--export-hf '%s': cannot make the folder: %s", dir.c_str(), ec.message().c_str());
    check(std::filesystem::is_empty(dir), "--export-hf '%s' is not empty\nHINT: give a new folder", dir.c_str());

    std::map<std::string, const Tensor*> ours;  // by the Hugging Face tensor that they are, or are part of
    std::vector<SafetensorsEntry> entries;
    for (const Tensor& t : table.tensors()) {
        for (const HfPart& part : t.spec.parts) {
            if (ours.emplace(part.name, &t).second) { entries.push_back({part.name, "F32", hf_shape(t.spec, part)}); }
        }
    }
    SafetensorsWriter writer(dir + "/model.safetensors", entries);
    const Tensor* held = nullptr;
    std::vector<float> values, stored;
    for (const SafetensorsEntry& e : writer.order()) {
        const Tensor* t = ours.at(e.name);
        if (t != held) {
            values.resize(t->count());
            read(*t, values.data());
            held = t;
        }
        stored.resize(e.bytes() / (i64)sizeof(float));
        for (const Slice& s : t->slices) {
            if (s.part.name != e.name) { continue; }
            for (i64 i = 0; i < s.rows; i++) {
                for (i64 j = 0; j < s.cols; j++) { stored[s.hf_index(i, j)] = values[(s.local_row + i) * t->cols + j]; }
            }
        }
        writer.write(stored.data(), e.bytes());
    }
    writer.finish();
    write_file_atomically(dir + "/config.json", hf_config(model).dump(2) + "\n");
}
