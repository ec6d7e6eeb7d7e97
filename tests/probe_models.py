"Small models of other projects, built from configs (nothing is downloaded), each with one training batch."

import torch

SIZE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
NAMES = ("gpt2", "llama", "opt", "bloom", "t5", "whisper", "vit", "bert")


def tiny(name):
    "`(model, keyword arguments of one training step)`."
    import transformers as T

    torch.manual_seed(0)
    ids = torch.randint(3, 64, (2, 12))
    text = dict(input_ids=ids, labels=ids)
    special = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    build = {
        "gpt2": lambda: T.GPT2LMHeadModel(
            T.GPT2Config(
                vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2
            )
        ),
        "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(vocab_size=64, num_key_value_heads=2, **SIZE)),
        "opt": lambda: T.OPTForCausalLM(
            T.OPTConfig(
                vocab_size=64,
                hidden_size=32,
                ffn_dim=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                word_embed_proj_dim=32,
                max_position_embeddings=32,
            )
        ),
        "bloom": lambda: T.BloomForCausalLM(
            T.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)
        ),
        "t5": lambda: T.T5ForConditionalGeneration(
            T.T5Config(
                vocab_size=64,
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ),
        "whisper": lambda: T.WhisperForConditionalGeneration(
            T.WhisperConfig(
                vocab_size=64,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                num_mel_bins=8,
                max_source_positions=16,
                max_target_positions=16,
                decoder_start_token_id=1,
                **special,
            )
        ),
        "vit": lambda: T.ViTForImageClassification(
            T.ViTConfig(image_size=16, patch_size=8, num_labels=4, **SIZE)
        ),
        "bert": lambda: T.BertForMaskedLM(T.BertConfig(vocab_size=64, max_position_embeddings=32, **SIZE)),
    }
    data = {
        "whisper": lambda: dict(input_features=torch.randn(2, 8, 32), labels=ids),
        "vit": lambda: dict(pixel_values=torch.randn(2, 3, 16, 16), labels=torch.tensor([0, 1])),
    }
    return build[name](), data.get(name, lambda: text)()
