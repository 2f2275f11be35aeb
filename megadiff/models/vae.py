"""The decoder of a diffusers VAE from a local folder, for losses on pixels where the network sees latents."""

from pathlib import Path

from torch import Tensor, nn

from megadiff.errors import ConfigError


class LatentDecoder(nn.Module):
    """Latents as the network sees them to pixels in about [-1, 1]; frozen, but gradients flow through."""

    def __init__(self, vae: nn.Module, scale: float, shift: float) -> None:
        super().__init__()
        self.vae, self.scale, self.shift = vae, scale, shift
        self.requires_grad_(False)

    def forward(self, latents: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, 3, H x factor, W x factor)."""
        decoded: Tensor = self.vae.decode(latents / self.scale + self.shift).sample  # type: ignore[operator]
        return decoded


def load_decoder(path: Path, channels: int) -> LatentDecoder:
    """Opens `path`, a folder of diffusers' AutoencoderKL.

    Raises:
        ConfigError: diffusers is not installed, the folder holds no VAE, or its latents have other channels.
    """
    try:
        from diffusers import AutoencoderKL
    except ImportError as error:
        raise ConfigError("diffusion.vae_path needs diffusers; pip install diffusers, or remove it") from error
    if not (path / "config.json").is_file():
        raise ConfigError(f"diffusion.vae_path = {path} has no config.json; give a folder of diffusers' AutoencoderKL")
    try:
        vae = AutoencoderKL.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        line = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"diffusion.vae_path = {path} cannot be read: {line}") from error
    if vae.config.latent_channels != channels:
        raise ConfigError(
            f"diffusion.vae_path = {path} decodes {vae.config.latent_channels} channels, but model.in_channels = "
            f"{channels}; give the VAE that made the latents"
        )
    return LatentDecoder(vae.eval(), vae.config.scaling_factor, vae.config.shift_factor or 0.0)
