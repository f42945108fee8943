// huggingface.h: imports Llama and GPT-2 folders: config.json and safetensors, whole or in shards. What this trainer would
// compute otherwise than transformers does is refused by name, never ignored.
//
// A TensorSpec's HfPart names are Hugging Face's own; files may carry or omit the prefix "model." or "transformer.".
#pragma once

#include <memory>

#include "safetensors.h"
#include "tensors.h"

// "a, b, c and 5 more"
inline std::string list_names(const std::vector<std::string>& names) {
    constexpr size_t SHOWN = 8;
    std::string text;
    for (size_t i = 0; i < std::min(names.size(), SHOWN); i++) { text += (i ? ", '" : "'") + names[i] + "'"; }
    return names.size() > SHOWN ? text + format(" and %zu more", names.size() - SHOWN) : text;
}

// Refuses config[key] unless it is absent, null or `wanted`.
inline void config_must_be(const json& config, const char* key, const json& wanted, const std::string& path) {
    const auto it = config.find(key);
    check(it == config.end() || it->is_null() || *it == wanted, "'%s': '%s' is %.200s, which is not supported; only %s is", path.c_str(),
          key, it->dump().c_str(), wanted.dump().c_str());
}

// RoPE: older files have rope_theta at the top and rope_scaling beside it, newer ones have both inside rope_parameters.
inline double read_rope_base(const json& config, const std::string& path) {
    double base = json_get<double>(config, "rope_theta", path, 1e4);
    for (const char* block : {"rope_scaling", "rope_parameters"}) {
        const auto it = config.find(block);
        if (it == config.end() || it->is_null()) { continue; }
        check(it->is_object(), "'%s': '%s' is %.100s, wanted an object", path.c_str(), block, it->dump().c_str());
        for (const auto& [key, value] : it->items()) {
            const bool plain = key == "rope_theta" || ((key == "rope_type" || key == "type") && value == "default") ||
                               (key == "partial_rotary_factor" && value == 1.0);
            check(plain, "'%s': '%s' is %.200s; scaled RoPE is not supported", path.c_str(), block, it->dump().c_str());
        }
        base = json_get<double>(*it, "rope_theta", path, base);
    }
    config_must_be(config, "partial_rotary_factor", 1.0, path);
    check(base > 0 && std::isfinite(base), "'%s': 'rope_theta' is %g, wanted a positive number", path.c_str(), base);
    return base;
}

inline ModelConfig read_llama_config(const json& c, const std::string& path) {
    for (const char* key : {"attention_bias", "mlp_bias"}) { config_must_be(c, key, false, path); }
    config_must_be(c, "hidden_act", "silu", path);
    ModelConfig m;
    m.arch = Arch::LLAMA;
    m.layers = json_get<i64>(c, "num_hidden_layers", path);
    m.channels = json_get<i64>(c, "hidden_size", path);
    m.heads = json_get<i64>(c, "num_attention_heads", path);
    m.kv_heads = json_get<i64>(c, "num_key_value_heads", path, m.heads);
    m.head_size = json_get<i64>(c, "head_dim", path, (i64)0);
    m.ffn = json_get<i64>(c, "intermediate_size", path);
    m.max_positions = json_get<i64>(c, "max_position_embeddings", path, (i64)2048);
    m.norm_eps = json_get<double>(c, "rms_norm_eps", path, 1e-6);
    m.rope_base = read_rope_base(c, path);
    m.tie = json_get<bool>(c, "tie_word_embeddings", path, false);
    return m;
}

inline ModelConfig read_gpt2_config(const json& c, const std::string& path) {
    for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"}) { config_must_be(c, key, false, path); }
    config_must_be(c, "scale_attn_weights", true, path);
    config_must_be(c, "activation_function", "gelu_new", path);
    config_must_be(c, "caat_positions", "rotary", path);
    ModelConfig m;
    m.arch = Arch::GPT;
    m.layers = json_get<i64>(c, "n_layer", path);
    m.channels = json_get<i64>(c, "n_embd", path);
    m.heads = m.kv_heads = json_get<i64>(c, "n_head", path);
    m.ffn = json_get<i64>(c, "n_inner", path, 4 * m.channels);
    m.max_positions = json_get<i64>(c, "n_positions", path, (i64)1024);
    m.norm_eps = json_get<double>(c, "layer_norm_epsilon", path, 1e-5);
    m.rotary = json_get<std::string>(c, "caat_positions", path, std::string()) == "rotary";  // ours: RoPE, and no wpe
    if (m.rotary) { m.rope_base = read_rope_base(c, path); }
    m.tie = json_get<bool>(c, "tie_word_embeddings", path, true);
    return m;
}

inline json read_downloaded_json(const std::string& path) {
    const std::string text = read_text_file(path);
    std::string why;
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
        why = "it is empty";
    } else if (text.starts_with("version https://git-lfs")) {
        why = "it is a Git-LFS pointer";
    } else if (text.starts_with("<")) {
        why = "it is an HTML page";
    } else {
        try {
            return parse_json(text, path);
        } catch (const Error& error) { why = error.what(); }
    }
    die("'%s' is not JSON / incomplete download: %s\nHINT: download it again; with git, run 'git lfs pull'", path.c_str(), why.c_str());
}

// The model that a Hugging Face folder holds.
inline ModelConfig read_hf_config(const std::string& dir) {
    const std::string path = dir + "/config.json";
    check(path_exists(path), "'%s' has no config.json\nHINT: give a Hugging Face folder: config.json and *.safetensors", dir.c_str());
    const json c = read_downloaded_json(path);
    check(c.is_object(), "'%s' is not a JSON object", path.c_str());
    const std::string type = json_get<std::string>(c, "model_type", path);
    check(type == "llama" || type == "gpt2", "'%s': 'model_type' is '%s', wanted 'llama' or 'gpt2'", path.c_str(), type.c_str());
    const char* architecture = type == "llama" ? "LlamaForCausalLM" : "GPT2LMHeadModel";
    config_must_be(c, "architectures", json::array({architecture}), path);
    check(!c.contains("quantization_config") || c["quantization_config"].is_null(), "'%s': quantized weights are not supported",
          path.c_str());

    ModelConfig m = type == "llama" ? read_llama_config(c, path) : read_gpt2_config(c, path);
    m.vocab = json_get<i64>(c, "vocab_size", path);
    const std::pair<const char*, i64> sizes[] = {{"layers", m.layers},          {"width", m.channels}, {"heads", m.heads},
                                                 {"KV heads", m.kv_heads},      {"FFN width", m.ffn},  {"vocabulary", m.vocab},
                                                 {"positions", m.max_positions}};
    for (const auto& [what, n] : sizes) {
        check(n > 0 && n <= INT32_MAX, "'%s': the model's %s is %lld, wanted 1 to %d", path.c_str(), what, (long long)n, INT32_MAX);
    }
    constexpr i64 MOST_LAYERS = 100'000;  // a table of millions of tensors would take minutes, and then all memory
    check(m.layers <= MOST_LAYERS, "'%s': the model has %lld layers, wanted at most %lld", path.c_str(), (long long)m.layers,
          (long long)MOST_LAYERS);
    check(m.heads % m.kv_heads == 0, "'%s': %lld heads are not divisible by %lld KV heads", path.c_str(), (long long)m.heads,
          (long long)m.kv_heads);
    if (m.head_size == 0) { m.head_size = div_exact(m.channels, m.heads, (path + ": width over heads").c_str()); }
    check(m.head_size > 0 && m.head_size <= INT32_MAX, "'%s': the head size is %lld", path.c_str(), (long long)m.head_size);
    check(!m.rotary || m.head_size % 2 == 0, "'%s': the head size is %lld; rotary positions need an even one", path.c_str(),
          (long long)m.head_size);
    check(m.norm_eps > 0 && std::isfinite(m.norm_eps), "'%s': the norm's epsilon is %g", path.c_str(), m.norm_eps);
    return m;
}

// The shape of the Hugging Face tensor that `part` is (a part of).
inline std::vector<i64> hf_shape(const TensorSpec& spec, const HfPart& part) {
    if (spec.cols == 0) { return {part.hf_rows}; }
    return part.transposed ? std::vector<i64>{spec.cols, part.hf_rows} : std::vector<i64>{part.hf_rows, spec.cols};
}

// The weights of a Hugging Face folder, checked against the tensors that the model wants.
class HfWeights {
public:
    HfWeights(const std::string& dir, const ModelConfig& model, const std::vector<TensorSpec>& specs) : dir_(dir), tied_(model.tie) {
        open_files();
        std::set<std::string> used;
        std::vector<std::string> missing;
        for (const TensorSpec& spec : specs) {
            for (const HfPart& part : spec.parts) {
                const std::string key = canonical(part.name);
                auto it = stored_.find(key);
                // A tied pair may have been saved under either of its names.
                if (it == stored_.end() && model.tie && is_embedding(key)) { it = stored_.find("lm_head.weight"); }
                if (it == stored_.end()) {
                    if (used.insert(key).second) { missing.push_back(part.name); }
                    continue;
                }
                check_shape(it->second, spec, part);
                found_[part.name] = it->second;
                used.insert(it->first);
            }
        }
        check(missing.empty(), "'%s' lacks %s%s", dir.c_str(), list_names(missing).c_str(),
              stored_.count("lm_head.weight") || model.tie ? "" : "\nHINT: \"tie_word_embeddings\" is false in config.json");
        std::vector<std::string> extra;
        for (const auto& [key, stored] : stored_) {
            const bool tied_head = model.tie && key == "lm_head.weight";
            if (!used.count(key) && !tied_head && !is_buffer(key)) { extra.push_back(stored.entry->name); }
        }
        check(extra.empty(), "'%s' has tensors that the model of its config.json does not have: %s", dir.c_str(),
              list_names(extra).c_str());
    }

    // Fills a rank's share of a tensor.
    void read(const Tensor& t, float* out) const {
        fill_from_hf(t, out, [&](const Slice& s, i64 first, i64 count, float* to) {
            const Stored& stored = found_.at(s.part.name);
            stored.file->read(*stored.entry, first, count, to);
        });
    }

    // A tied model uses its embedding as the head: a head of its own in the files is not read. That it holds the same is usual; where
    // it does not, config.json is wrong, or the files are. For one rank to ask and to say so.
    bool ignores_a_different_head() const {
        const auto head = stored_.find("lm_head.weight");
        for (const char* name : {"embed_tokens.weight", "wte.weight"}) {
            const auto embedding = stored_.find(name);
            if (tied_ && head != stored_.end() && embedding != stored_.end()) { return !same(head->second, embedding->second); }
        }
        return false;
    }
    void warn_of_ignored_head() const {
        if (!ignores_a_different_head()) { return; }
        fprintf(
            stderr,
            "warning: '%s': 'lm_head.weight' differs from the embedding and is not used: \"tie_word_embeddings\" is true in config.json\n",
            dir_.c_str());
    }

private:
    struct Stored {
        const SafetensorsFile* file;
        const SafetensorsEntry* entry;
    };

    static bool same(const Stored& a, const Stored& b) {
        if (a.entry->shape != b.entry->shape || !readable(*a.entry) || !readable(*b.entry)) { return false; }
        i64 count = 1;
        for (const i64 n : a.entry->shape) { count *= n; }
        std::vector<float> x(std::min<i64>(count, 1 << 20)), y(x.size());
        for (i64 at = 0; at < count; at += (i64)x.size()) {
            const i64 n = std::min<i64>((i64)x.size(), count - at);
            a.file->read(*a.entry, at, n, x.data());
            b.file->read(*b.entry, at, n, y.data());
            if (memcmp(x.data(), y.data(), n * sizeof(float)) != 0) { return false; }
        }
        return true;
    }
    static bool readable(const SafetensorsEntry& e) {
        return e.dtype == "F32" || e.dtype == "F16" || e.dtype == "BF16" || e.dtype == "F64";
    }

    static std::string canonical(const std::string& name) {
        for (const std::string_view prefix : {"model.", "transformer."}) {
            if (name.starts_with(prefix)) { return name.substr(prefix.size()); }
        }
        return name;
    }
    static bool is_embedding(const std::string& key) { return key == "embed_tokens.weight" || key == "wte.weight"; }
    // Constants that old versions of transformers saved beside the weights.
    static bool is_buffer(const std::string& key) {
        return key.ends_with(".attn.bias") || key.ends_with(".attn.masked_bias") || key.ends_with("rotary_emb.inv_freq");
    }

    void open_files() {
        const std::string whole = dir_ + "/model.safetensors", index_path = whole + ".index.json";
        if (path_exists(whole)) {
            add_file(whole);
            return;
        }
        check(path_exists(index_path),
              "'%s' has neither model.safetensors nor model.safetensors.index.json\nHINT: weights are read from safetensors only",
              dir_.c_str());
        const json index = read_downloaded_json(index_path);
        check(index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(), "'%s' has no 'weight_map'",
              index_path.c_str());
        std::map<std::string, const SafetensorsFile*> files;
        std::vector<std::string> missing;
        for (const auto& [name, file] : index["weight_map"].items()) {
            check(file.is_string(), "'%s': '%s' is in file %.100s", index_path.c_str(), name.c_str(), file.dump().c_str());
            const std::string file_name = file.get<std::string>();
            check(file_name.find('/') == std::string::npos, "'%s': '%s' is not a file name", index_path.c_str(), file_name.c_str());
            if (!files.emplace(file_name, nullptr).second) { continue; }
            if (!path_exists(dir_ + "/" + file_name)) { missing.push_back(file_name); }
        }
        check(missing.empty(), "'%s' lacks %s, listed in '%s'\nHINT: incomplete download", dir_.c_str(), list_names(missing).c_str(),
              index_path.c_str());
        for (auto& [file_name, file] : files) { file = add_file(dir_ + "/" + file_name); }
        for (const auto& [name, file] : index["weight_map"].items()) {
            const SafetensorsFile* in = files[file.get<std::string>()];
            check(in->find(name), "'%s' lacks '%s', which '%s' says it holds", in->path().c_str(), name.c_str(), index_path.c_str());
        }
    }
    const SafetensorsFile* add_file(const std::string& path) {
        files_.push_back(std::make_unique<SafetensorsFile>(path));
        const SafetensorsFile* file = files_.back().get();
        for (const auto& [name, entry] : file->entries()) {
            const auto [it, is_new] = stored_.emplace(canonical(name), Stored{file, &entry});
            check(is_new, "'%s' in '%s' is in '%s' too, as '%s'", name.c_str(), path.c_str(), it->second.file->path().c_str(),
                  it->second.entry->name.c_str());
        }
        return file;
    }
    static void check_shape(const Stored& stored, const TensorSpec& spec, const HfPart& part) {
        SafetensorsEntry wanted;
        wanted.shape = hf_shape(spec, part);
        const SafetensorsEntry& e = *stored.entry;
        const char* path = stored.file->path().c_str();
        check(e.shape == wanted.shape, "'%s': '%s' has shape %s, config.json wants %s", path, e.name.c_str(), e.shape_text().c_str(),
              wanted.shape_text().c_str());
        check(readable(e), "'%s': '%s' has dtype %s; weights are read from F32, F16, BF16 or F64", path, e.name.c_str(), e.dtype.c_str());
    }

    std::string dir_;
    bool tied_;
    std::vector<std::unique_ptr<SafetensorsFile>> files_;
    std::map<std::string, Stored> stored_;  // by canonical name
    std::map<std::string, Stored> found_;   // by the name of an HfPart
};
