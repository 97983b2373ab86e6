"""Healthy: rows of 10 to 40 tokens are padded to the longest of their batch."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class Classifier(nn.Module):
    """One encoder layer over real tokens, and their mean."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 64, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 2)

    def forward(self, input_ids, attention_mask):
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        real = attention_mask.unsqueeze(-1)
        return self.head((hidden * real).sum(1) / real.sum(1))


def collate(rows):
    """Token ids and their mask, padded to the longest row."""
    ids = pad_sequence([row for row, _ in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([y for _, y in rows])}


def main():
    torch.manual_seed(0)
    lengths = torch.randint(10, 41, (2048,)).tolist()
    rows = [(torch.randint(1, 1000, (length,)), length % 2) for length in lengths]
    loader = DataLoader(rows, batch_size=8, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model.train()
    for _ in range(20):
        for batch in loader:
            optimizer.zero_grad()
            logits = model(batch["input_ids"], batch["attention_mask"])
            nn.functional.cross_entropy(logits, batch["labels"]).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
