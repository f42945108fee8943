// test_huggingface.cpp: the import of Hugging Face folders, whole and broken.
#include <gtest/gtest.h>

#include "llmc/huggingface_export.h"
#include "llmc/init.h"
#include "tiny_models.h"

namespace {

json config_of(const ModelConfig& m) {
    if (m.is_llama()) {
        return {{"model_type", "llama"},
                {"architectures", {"LlamaForCausalLM"}},
                {"hidden_size", m.channels},
                {"intermediate_size", m.ffn},
                {"num_hidden_layers", m.layers},
                {"num_attention_heads", m.heads},
                {"num_key_value_heads", m.kv_heads},
                {"head_dim", m.head_size},
                {"vocab_size", m.vocab},
                {"max_position_embeddings", m.max_positions},
                {"rms_norm_eps", m.norm_eps},
                {"rope_theta", m.rope_base},
                {"hidden_act", "silu"},
                {"tie_word_embeddings", m.tie}};
    }
    return {{"model_type", "gpt2"}, {"n_embd", m.channels},           {"n_layer", m.layers},   {"n_head", m.heads},
            {"n_inner", m.ffn},     {"n_positions", m.max_positions}, {"vocab_size", m.vocab}, {"activation_function", "gelu_new"}};
}

// What element `index` of the stored tensor is in these tests; exact in every dtype.
float value_of(const std::string& name, i64 index) { return (float)((i64)(fnv1a_64(name) % 1009 + index * 7) % 255 - 127); }

using Shapes = std::map<std::string, std::vector<i64>>;
Shapes shapes_of(const ModelConfig& m) {
    Shapes shapes;
    for (const TensorSpec& spec : tiny_specs(m)) {
        for (const HfPart& part : spec.parts) {
            shapes[part.name] = hf_shape(spec, part);
        }
    }
    return shapes;
}
std::string identity(const std::string& name) { return name; }

// The file's names are name(ours).
void write_tensors(const std::string& path, const Shapes& shapes, const std::string& dtype = "F32",
                   std::string (*name)(const std::string&) = identity) {
    std::vector<SafetensorsEntry> entries;
    std::map<std::string, std::string> ours;
    for (const auto& [each, shape] : shapes) {
        entries.push_back({name(each), dtype, shape});
        ours[name(each)] = each;
    }
    SafetensorsWriter writer(path, entries);
    for (const SafetensorsEntry& e : writer.order()) {
        const i64 size = dtype == "F64" ? 8 : dtype == "F32" ? 4 : dtype == "I8" ? 1 : 2;
        for (i64 i = 0; i < e.bytes() / size; i++) {
            const float x = value_of(ours[e.name], i);
            const double d = x;
            const _Float16 h = (_Float16)x;
            const uint16_t b = (uint16_t)(std::bit_cast<uint32_t>(x) >> 16);
            writer.write(dtype == "F64"    ? (const void*)&d
                         : dtype == "F16"  ? (const void*)&h
                         : dtype == "BF16" ? (const void*)&b
                                           : &x,
                         size);
        }
    }
    writer.finish();
}

// Writes a folder and imports it on rank `rank` of T.
std::map<std::string, std::vector<float>> import(const std::string& dir, int T = 1, int rank = 0) {
    const ModelConfig model = read_hf_config(dir);
    const std::vector<TensorSpec> specs = tiny_specs(model);
    const HfWeights weights(dir, model, specs);
    const ParameterTable table(model, specs, T, rank);
    std::map<std::string, std::vector<float>> tensors;
    for (const Tensor& t : table.tensors()) {
        std::vector<float>& values = tensors[t.spec.name];
        values.resize(t.count());
        weights.read(t, values.data());
    }
    return tensors;
}

// The mapping written out, independently of slices: which stored element is at (i, j) of rank r's share.
TEST(HuggingFace, SplitsByContent) {
    for (ModelConfig m : {tiny_llama(), tiny_gpt()}) {
        if (m.is_llama()) { m.kv_heads = 4; }
        const TempDir dir;
        write_file(dir.path + "/config.json", config_of(m).dump());
        write_tensors(dir.path + "/model.safetensors", shapes_of(m));
        const i64 C = m.channels, A = m.attn_width(), K = m.kv_heads * m.head_size, F = m.ffn, Vr = 27;
        for (const int T : {1, 2, 4}) {
            for (int r = 0; r < T; r++) {
                const auto got = import(dir.path, T, r);
                const auto expect = [&](const std::string& ours, i64 at, const std::string& theirs, i64 index) {
                    ASSERT_EQ(got.at(ours)[at], value_of(theirs, index)) << ours << " " << at << " at T = " << T;
                };
                const i64 Ar = A / T, Kr = K / T, Fr = F / T;
                ASSERT_EQ((i64)got.at("layers.1.qkv").size(), (Ar + 2 * Kr) * C);
                ASSERT_EQ((i64)got.at("layers.1.down").size(), C * Fr);
                for (i64 j = 0; j < C; j++) {
                    const std::string hf = m.is_llama() ? "model.layers.1." : "h.1.";
                    for (i64 i = 0; i < Ar; i++) {
                        if (m.is_llama()) {
                            expect("layers.1.qkv", i * C + j, hf + "self_attn.q_proj.weight", (r * Ar + i) * C + j);
                            expect("layers.1.attn_out", j * Ar + i, hf + "self_attn.o_proj.weight", j * A + r * Ar + i);
                        } else {
                            for (i64 band = 0; band < 3; band++) {
                                expect("layers.1.qkv", (band * Ar + i) * C + j, hf + "attn.c_attn.weight",
                                       j * 3 * A + band * A + r * Ar + i);
                                expect("layers.1.qkv_bias", band * Ar + i, hf + "attn.c_attn.bias", band * A + r * Ar + i);
                            }
                            expect("layers.1.attn_out", j * Ar + i, hf + "attn.c_proj.weight", (r * Ar + i) * C + j);
                        }
                    }
                    for (i64 i = 0; m.is_llama() && i < Kr; i++) {
                        expect("layers.1.qkv", (Ar + i) * C + j, hf + "self_attn.k_proj.weight", (r * Kr + i) * C + j);
                        expect("layers.1.qkv", (Ar + Kr + i) * C + j, hf + "self_attn.v_proj.weight", (r * Kr + i) * C + j);
                    }
                    for (i64 i = 0; i < Fr; i++) {
                        if (m.is_llama()) {
                            expect("layers.1.up", i * C + j, hf + "mlp.gate_proj.weight", (r * Fr + i) * C + j);
                            expect("layers.1.up", (Fr + i) * C + j, hf + "mlp.up_proj.weight", (r * Fr + i) * C + j);
                            expect("layers.1.down", j * Fr + i, hf + "mlp.down_proj.weight", j * F + r * Fr + i);
                        } else {
                            expect("layers.1.up", i * C + j, hf + "mlp.c_fc.weight", j * F + r * Fr + i);
                            expect("layers.1.down", j * Fr + i, hf + "mlp.c_proj.weight", (r * Fr + i) * C + j);
                        }
                    }
                    expect("final_norm", j, m.is_llama() ? "model.norm.weight" : "ln_f.weight", j);
                    if (T == 2) { expect("embedding", j, m.is_llama() ? "model.embed_tokens.weight" : "wte.weight", r * Vr * C + j); }
                }
            }
        }
    }
}

TEST(HuggingFace, NamesDtypesAndTiesVary) {
    const TempDir dir;
    const std::string file = dir.path + "/model.safetensors", config = dir.path + "/config.json";
    const ModelConfig gpt = tiny_gpt();
    write_file(config, config_of(gpt).dump());
    write_tensors(file, shapes_of(gpt));
    const auto wanted = import(dir.path);
    for (const char* dtype : {"F16", "BF16", "F64"}) {
        write_tensors(file, shapes_of(gpt), dtype);
        EXPECT_EQ(import(dir.path), wanted) << dtype;
    }
    Shapes shapes = shapes_of(gpt);
    shapes["h.0.attn.bias"] = {1, 1, 4, 4}, shapes["h.0.attn.masked_bias"] = {}, shapes["lm_head.weight"] = {gpt.vocab, gpt.channels};
    write_tensors(file, shapes, "F32", [](const std::string& name) { return name == "lm_head.weight" ? name : "transformer." + name; });
    EXPECT_EQ(import(dir.path), wanted);
    // A tied pair saved under the head's name only.
    write_tensors(file, shapes_of(gpt), "F32", [](const std::string& name) { return name == "wte.weight" ? "lm_head.weight" : name; });
    EXPECT_EQ(import(dir.path), wanted);
    write_tensors(file, shapes_of(gpt), "I8");
    expect_mentions(message_of([&] { import(dir.path); }), {"model.safetensors", "I8"});

    ModelConfig llama = tiny_llama();
    write_file(config, config_of(llama).dump());
    shapes = shapes_of(llama);
    shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = {2};
    write_tensors(file, shapes);
    EXPECT_EQ(message_of([&] { import(dir.path); }), "");
    shapes.erase("lm_head.weight");
    write_tensors(file, shapes);
    expect_mentions(message_of([&] { import(dir.path); }), {"'lm_head.weight'", "tie_word_embeddings"});
    shapes = shapes_of(llama);
    shapes.erase("model.layers.1.mlp.up_proj.weight"), shapes.erase("model.norm.weight");
    write_tensors(file, shapes);
    expect_mentions(message_of([&] { import(dir.path); }), {"lacks 'model.layers.1.mlp.up_proj.weight', 'model.norm.weight'"});
    shapes = shapes_of(llama);
    shapes["model.layers.2.mlp.up_proj.weight"] = {2}, shapes["model.layers.0.self_attn.q_proj.bias"] = {2};
    write_tensors(file, shapes);
    expect_mentions(message_of([&] { import(dir.path); }),
                    {"'model.layers.2.mlp.up_proj.weight'", "'model.layers.0.self_attn.q_proj.bias'"});
    shapes = shapes_of(llama);
    shapes["model.layers.0.mlp.up_proj.weight"] = {llama.channels, llama.ffn};
    write_tensors(file, shapes);
    expect_mentions(message_of([&] { import(dir.path); }), {"up_proj", "[24, 36]", "[36, 24]"});
}

// A tied model whose files hold a head too: the same values in whatever dtype are as it should be.
TEST(HuggingFace, AHeadThatIsNotUsed) {
    const TempDir dir;
    const ModelConfig gpt = tiny_gpt();
    write_file(dir.path + "/config.json", config_of(gpt).dump());
    const auto differs = [&](bool with_head, i64 head_rows, float last, const char* head_dtype = "F32") {
        std::vector<SafetensorsEntry> entries;
        for (const auto& [name, shape] : shapes_of(gpt)) { entries.push_back({name, "F32", shape}); }
        if (with_head) { entries.push_back({"lm_head.weight", head_dtype, {head_rows, gpt.channels}}); }
        SafetensorsWriter writer(dir.path + "/model.safetensors", entries);
        for (const SafetensorsEntry& e : writer.order()) {
            const i64 size = e.dtype == "F32" ? 4 : 2, count = e.bytes() / size;
            for (i64 i = 0; i < count; i++) {
                const float x = e.name == "lm_head.weight" && i == count - 1 ? last : 2.0f;
                const uint16_t b = (uint16_t)(std::bit_cast<uint32_t>(x) >> 16);
                writer.write(size == 4 ? (const void*)&x : &b, size);
            }
        }
        writer.finish();
        const HfWeights weights(dir.path, gpt, tiny_specs(gpt));
        testing::internal::CaptureStderr();
        weights.warn_of_ignored_head();
        const std::string said = testing::internal::GetCapturedStderr();
        if (!said.empty()) { expect_mentions(said, {"warning", dir.path, "lm_head.weight", "tie_word_embeddings"}); }
        return !said.empty();
    };
    EXPECT_FALSE(differs(false, 0, 0));
    EXPECT_FALSE(differs(true, gpt.vocab, 2));
    EXPECT_FALSE(differs(true, gpt.vocab, 2, "BF16"));
    EXPECT_TRUE(differs(true, gpt.vocab, 3));
    EXPECT_TRUE(differs(true, gpt.vocab + 1, 2));
    EXPECT_TRUE(differs(true, gpt.vocab, 2, "I16"));
}

TEST(HuggingFace, Shards) {
    const TempDir dir;
    const ModelConfig m = tiny_llama();
    write_file(dir.path + "/config.json", config_of(m).dump());
    expect_mentions(message_of([&] { import(dir.path); }), {"neither model.safetensors nor"});
    const std::string names[] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"},
                      index = dir.path + "/model.safetensors.index.json";
    Shapes halves[2];
    json map;
    int n = 0;
    for (const auto& [name, shape] : shapes_of(m)) {
        halves[n % 2][name] = shape;
        map[name] = names[n++ % 2];
    }
    const auto write_all = [&] {
        for (int i = 0; i < 2; i++) { write_tensors(dir.path + "/" + names[i], halves[i]); }
        write_file(index, json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());
    };
    write_all();
    const auto sharded = import(dir.path);
    write_tensors(dir.path + "/model.safetensors", shapes_of(m));  // both formats downloaded
    EXPECT_EQ(import(dir.path), sharded);
    unlink((dir.path + "/model.safetensors").c_str());
    unlink((dir.path + "/" + names[1]).c_str());
    expect_mentions(message_of([&] { import(dir.path); }), {"lacks '" + names[1] + "'", "incomplete download"});
    halves[1]["model.norm.weight"] = halves[0]["model.norm.weight"] = {m.channels};
    write_all();
    expect_mentions(message_of([&] { import(dir.path); }), {"'model.norm.weight'", names[0], names[1]});
    halves[0].erase("model.norm.weight"), halves[1].erase("model.norm.weight");
    write_all();
    expect_mentions(message_of([&] { import(dir.path); }), {"lacks 'model.norm.weight'"});
    write_file(index, R"({"weight_map":{"a":"../b"}})");
    expect_mentions(message_of([&] { import(dir.path); }), {"index.json", "../b"});
}

TEST(HuggingFace, ConfigIsReadOrRefused) {
    const TempDir dir;
    const std::string path = dir.path + "/config.json";
    const auto read = [&](const ModelConfig& m, const json& patch) {
        json config = config_of(m);
        config.merge_patch(patch);
        for (const auto& [key, value] : patch.items()) {
            if (value == "null") { config[key] = nullptr; }
            if (value == "absent") { config.erase(key); }
        }
        write_file(path, config.dump());
        return read_hf_config(dir.path);
    };
    const ModelConfig llama = tiny_llama(), gpt = tiny_gpt();
    const json same = json::object();
    EXPECT_EQ(read(llama, same).norm_eps, 1e-5);
    EXPECT_EQ(read(llama, {{"rms_norm_eps", 1e-6}}).norm_eps, 1e-6);
    EXPECT_EQ(read(llama, {{"rope_theta", 500000}}).rope_base, 5e5);
    EXPECT_EQ(read(llama, {{"rope_theta", "absent"}}).rope_base, 1e4);
    EXPECT_EQ(read(llama, {{"rope_theta", "absent"}, {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 2e5}}}}).rope_base, 2e5);
    EXPECT_EQ(read(llama, {{"head_dim", "null"}, {"rope_scaling", "null"}}).head_size, 2);
    EXPECT_EQ(read(llama, {{"num_key_value_heads", "absent"}}).kv_heads, 12);
    EXPECT_FALSE(read(llama, {{"tie_word_embeddings", "absent"}}).tie);
    EXPECT_TRUE(read(gpt, same).tie);
    EXPECT_FALSE(read(gpt, {{"tie_word_embeddings", false}}).tie);
    EXPECT_EQ(read(gpt, {{"n_inner", "null"}}).ffn, 96);
    EXPECT_FALSE(read(gpt, same).rotary);
    EXPECT_EQ(read(gpt, same).max_positions, 32);
    const ModelConfig rotary = read(gpt, {{"caat_positions", "rotary"}, {"rope_theta", 3e4}});
    EXPECT_TRUE(rotary.rotary);
    EXPECT_EQ(rotary.rope_base, 3e4);

    const auto refused = [&](const ModelConfig& m, const json& patch, const std::vector<std::string>& words) {
        const std::string message = message_of([&] { read(m, patch); });
        expect_mentions(message, {"config.json"});
        expect_mentions(message, words);
    };
    refused(llama, {{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}}, {"rope_scaling", "linear"});
    refused(llama, {{"rope_parameters", {{"rope_type", "llama3"}}}}, {"rope_parameters", "llama3"});
    refused(llama, {{"hidden_act", "gelu"}}, {"hidden_act", "gelu", "silu"});
    refused(llama, {{"attention_bias", true}}, {"attention_bias"});
    refused(llama, {{"mlp_bias", true}}, {"mlp_bias"});
    refused(llama, {{"hidden_size", "absent"}}, {"hidden_size"});
    refused(llama, {{"hidden_size", "64"}}, {"hidden_size", "integer"});
    refused(llama, {{"hidden_size", 64.5}}, {"hidden_size", "64.5"});
    refused(llama, {{"num_key_value_heads", 5}}, {"12", "5"});
    refused(llama, {{"num_key_value_heads", 0}}, {"KV heads"});
    refused(llama, {{"vocab_size", -1}}, {"-1"});
    refused(llama, {{"rope_theta", 0}}, {"rope_theta"});
    refused(llama, {{"model_type", "mistral"}}, {"mistral"});
    refused(llama, {{"architectures", {"LlamaForSequenceClassification"}}}, {"LlamaForSequenceClassification"});
    refused(llama, {{"quantization_config", {{"bits", 4}}}}, {"quantized"});
    refused(gpt, {{"activation_function", "relu"}}, {"activation_function", "relu"});
    refused(gpt, {{"scale_attn_by_inverse_layer_idx", true}}, {"scale_attn_by_inverse_layer_idx"});
    refused(gpt, {{"n_head", 5}}, {"24", "5"});
    refused(llama, {{"num_hidden_layers", 3000000}}, {"3000000 layers", "at most 100000"});
    const std::pair<const char*, const char*> downloads[] = {
        {"{", "JSON"},
        {"", "empty"},
        {" \n", "empty"},
        {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 437\n", "Git-LFS"},
        {"<!DOCTYPE html>", "HTML"}};
    for (const auto& [text, why] : downloads) {
        write_file(path, text);
        expect_mentions(message_of([&] { read_hf_config(dir.path); }), {"config.json' is not JSON / incomplete download", why, "HINT"});
    }
    expect_mentions(message_of([&] { read_hf_config(dir.path + "/nowhere"); }), {"nowhere", "HINT"});
}

TEST(HuggingFace, RealFolders) {
    int read = 0;
    for (const char* dir :
         {"dev/golden/models/gpt_learned", "dev/golden/models/gpt_rotary", "dev/golden/models/gpt_v9", "dev/golden/models/llama_gqa",
          "dev/golden/models/llama_hs20", "dev/golden/models/llama_t3", "../shared/data/stories260k/hf"}) {
        if (!is_directory(dir)) { continue; }
        EXPECT_EQ(message_of([&] { EXPECT_GT(import(dir).at("embedding").size(), 0u); }), "") << dir;
        read++;
    }
    if (read < 7) { printf("note: %d of 7 real folders are here\n", read); }
}

// Oracle: the import. Every kind of model, and GPT-2's transposed and joined tensors.
TEST(HuggingFace, ExportIsReadBackTheSame) {
    for (const char* dir : {"dev/golden/models/gpt_learned", "dev/golden/models/gpt_rotary", "dev/golden/models/gpt_v9",
                            "dev/golden/models/llama_gqa", "dev/golden/models/llama_hs20", "dev/golden/models/llama_t3"}) {
        const TempDir out;
        const auto tensors = import(dir);
        const ModelConfig model = read_hf_config(dir);
        const auto read = [&](const Tensor& t, float* values) { std::ranges::copy(tensors.at(t.spec.name), values); };
        const ParameterTable table(model, tiny_specs(model), 1, 0);
        export_hf(out.path + "/new", model, table, read);
        EXPECT_EQ(hf_config(read_hf_config(out.path + "/new")), hf_config(model)) << dir;
        EXPECT_EQ(import(out.path + "/new"), tensors) << dir;
        EXPECT_NE(message_of([&] { export_hf(out.path + "/new", model, table, read); }).find("is not empty"), std::string::npos);
    }
}

}  // namespace
