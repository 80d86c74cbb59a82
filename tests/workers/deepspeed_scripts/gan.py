"""A DCGAN of two engines, as the examples of DeepSpeed have it: the modules run, the engines backpropagate and step."""

import argparse
import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frontends.torch import deepspeed

NZ, NGF, NDF = 8, 8, 8


def get_argument_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batchSize", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--beta1", type=float, default=0.5)
    parser.add_argument("--outf", required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NZ, NGF, 4, 1, 0, bias=False),
            nn.BatchNorm2d(NGF),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, NDF, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(NDF, NDF, 3, 1, 1, bias=False),
            nn.BatchNorm2d(NDF),
            nn.LeakyReLU(0.2),
            nn.Conv2d(NDF, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1, 1).squeeze(1)


def weights_init(module):
    name = type(module).__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.1)
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def images():
    generator = torch.Generator().manual_seed(3)
    return torch.tanh(torch.randn(64, 1, 8, 8, generator=generator).cumsum(-1))


def main():
    args = get_argument_parser().parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(999)
    sampler = torch.utils.data.DistributedSampler(dataset := TensorDataset(images()))
    dataloader = DataLoader(dataset, batch_size=args.batchSize, sampler=sampler)
    netG, netD = Generator(), Discriminator()  # as such scripts call them
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCELoss()
    real_label, fake_label = 1, 0
    optimizerD = torch.optim.Adam(netD.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
    model_engineD, optimizerD, _, _ = deepspeed.initialize(
        args=args, model=netD, model_parameters=netD.parameters(), optimizer=optimizerD
    )
    model_engineG, optimizerG, _, _ = deepspeed.initialize(
        args=args, model=netG, model_parameters=netG.parameters(), optimizer=optimizerG
    )
    device = model_engineD.device
    log = []
    for epoch in range(args.epochs):
        for data in dataloader:
            # 1: the discriminator, on real and on generated images
            netD.zero_grad()
            real = data[0].to(device)
            size = real.size(0)
            label = torch.full((size,), real_label, dtype=real.dtype, device=device)
            errD_real = criterion(netD(real), label)
            model_engineD.backward(errD_real)
            fake = netG(torch.randn(size, NZ, 1, 1, device=device))
            label.fill_(fake_label)
            errD_fake = criterion(netD(fake.detach()), label)
            model_engineD.backward(errD_fake)
            model_engineD.step()
            # 2: the generator; this backward passes through the discriminator
            netG.zero_grad()
            label.fill_(real_label)
            errG = criterion(netD(fake), label)
            model_engineG.backward(errG)
            model_engineG.step()
            log.append({"epoch": epoch, "D": (errD_real + errD_fake).item(), "G": errG.item()})
    if model_engineD.global_rank == 0:
        os.makedirs(args.outf, exist_ok=True)
        torch.save(netG.state_dict(), os.path.join(args.outf, "netG.pth"))
        torch.save(netD.state_dict(), os.path.join(args.outf, "netD.pth"))
        with open(os.path.join(args.outf, "log.json"), "w") as file:
            json.dump(log, file)


if __name__ == "__main__":
    main()
